# The training pods' role: their service account, and nothing else, may take it.
data "aws_eks_cluster" "this" {
  name = var.cluster
}

data "aws_iam_openid_connect_provider" "cluster" {
  url = data.aws_eks_cluster.this.identity[0].oidc[0].issuer
}

locals {
  issuer = trimprefix(data.aws_eks_cluster.this.identity[0].oidc[0].issuer, "https://")
}

data "aws_iam_policy_document" "trust" {
  statement {
    actions = ["sts:AssumeRoleWithWebIdentity"]

    principals {
      type        = "Federated"
      identifiers = [data.aws_iam_openid_connect_provider.cluster.arn]
    }

    condition {
      test     = "StringEquals"
      variable = "${local.issuer}:aud"
      values   = ["sts.amazonaws.com"]
    }

    condition {
      test     = "StringEquals"
      variable = "${local.issuer}:sub"
      values   = ["system:serviceaccount:${var.namespace}:${var.service_account}"]
    }
  }
}

resource "aws_iam_role" "run" {
  name               = "${var.name}-run"
  assume_role_policy = data.aws_iam_policy_document.trust.json
}

# Exactly the requests of holdfast/store/s3.py: tests/infra/test_terraform.py records them.
data "aws_iam_policy_document" "store" {
  statement {
    sid       = "List"
    actions   = ["s3:ListBucket", "s3:ListBucketMultipartUploads"]
    resources = [aws_s3_bucket.runs.arn]
  }

  statement {
    sid       = "ReadWriteDelete"
    actions   = ["s3:AbortMultipartUpload", "s3:DeleteObject", "s3:GetObject", "s3:PutObject"]
    resources = ["${aws_s3_bucket.runs.arn}/*"]
  }
}

resource "aws_iam_role_policy" "store" {
  name   = "store"
  role   = aws_iam_role.run.id
  policy = data.aws_iam_policy_document.store.json
}
