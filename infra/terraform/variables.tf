# The settings: terraform.tfvars, which is yours, has at least those without a default.
variable "region" {
  description = "The AWS region of the cluster. Keep the bucket in the same one: traffic between regions costs money."
  type        = string

  validation {
    condition     = can(regex("^[a-z]{2}(-[a-z]+)+-[0-9]$", var.region))
    error_message = "A region looks like eu-central-1."
  }
}

variable "name" {
  description = "The name of everything that is made here: role, node group, image repository."
  type        = string
  default     = "holdfast"

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{1,30}$", var.name))
    error_message = "Use 2 to 31 lower-case letters, digits and hyphens, beginning with a letter."
  }
}

variable "bucket" {
  description = "The name of the bucket to make for the runs. It must be free in all of AWS."
  type        = string

  validation {
    condition     = can(regex("^[a-z0-9][a-z0-9-]{1,61}[a-z0-9]$", var.bucket))
    error_message = "Use 3 to 63 lower-case letters, digits and hyphens. A dot would break TLS."
  }
}

variable "noncurrent_days" {
  description = "Days that the bucket keeps what Holdfast has deleted or replaced. Current objects are never deleted."
  type        = number
  default     = 30

  validation {
    condition     = var.noncurrent_days >= 1 && floor(var.noncurrent_days) == var.noncurrent_days
    error_message = "Give whole days, 1 or more."
  }
}

variable "cluster" {
  description = "The name of the EKS cluster, which has an IAM OIDC provider (eksctl create cluster --with-oidc)."
  type        = string
}

variable "subnet_ids" {
  description = "The cluster's subnets for GPU nodes, each in another zone: a zone out of spot GPUs stops no run."
  type        = list(string)

  validation {
    condition     = length(distinct(var.subnet_ids)) >= 2
    error_message = "Give at least two subnets, in different zones."
  }
}

variable "instance_types" {
  description = "Instance types of the GPU nodes. More types, more spot capacity."
  type        = list(string)
  default     = ["g6.xlarge", "g6.2xlarge", "g6.4xlarge", "g6.8xlarge"] # one NVIDIA L4 each

  validation {
    condition     = length(distinct(var.instance_types)) >= 2
    error_message = "Give at least two types: one type alone is often out of stock as a spot instance."
  }

  validation {
    condition     = length(distinct([for each in var.instance_types : split(".", each)[0]])) == 1
    error_message = "Give types of one family: another GPU model computes other bits, so a run would not end on the same bytes."
  }
}

variable "min_nodes" {
  description = "GPU nodes that always run. 0 needs Cluster Autoscaler, which adds a node when a pod waits for one."
  type        = number
  default     = 0

  validation {
    condition     = var.min_nodes >= 0
    error_message = "Give 0 or more."
  }
}

variable "max_nodes" {
  description = "The highest number of GPU nodes at once."
  type        = number
  default     = 4

  validation {
    condition     = var.max_nodes >= 1 && var.max_nodes >= var.min_nodes
    error_message = "Give 1 or more, and not less than min_nodes."
  }
}

variable "disk_gib" {
  description = "A GPU node's disk, for the image and for a pod's scratch."
  type        = number
  default     = 100

  validation {
    condition     = var.disk_gib >= 50
    error_message = "Give 50 or more: the image alone takes up to 10."
  }
}

variable "namespace" {
  description = "The Kubernetes namespace of infra/kubernetes/rbac.yaml."
  type        = string
  default     = "holdfast"
}

variable "service_account" {
  description = "The Kubernetes service account of the training pods, in infra/kubernetes/rbac.yaml."
  type        = string
  default     = "holdfast-run"
}
