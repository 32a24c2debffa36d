# The values that the commands of docs/kubernetes.md take.
output "store" {
  description = "The `store` of a run's configuration."
  value       = "s3://${aws_s3_bucket.runs.bucket}"
}

output "repository" {
  description = "Where to push the image."
  value       = aws_ecr_repository.image.repository_url
}

output "annotation" {
  description = "The annotation that gives the pods' service account its role (kubectl annotate)."
  value       = "eks.amazonaws.com/role-arn=${aws_iam_role.run.arn}"
}

output "pool_settings" {
  description = "The settings of the work pools (python -m deployments.pools kubernetes --set ...)."
  value = {
    namespace            = var.namespace
    service_account_name = var.service_account
  }
}
