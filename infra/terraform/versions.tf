# Terraform and the provider for AWS, whose checksum is in .terraform.lock.hcl.
terraform {
  required_version = ">= 1.9"

  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = "~> 5.100"
    }
  }
}

provider "aws" {
  region = var.region

  default_tags {
    tags = {
      project = var.name
    }
  }
}
