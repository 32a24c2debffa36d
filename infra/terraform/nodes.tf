# Spot nodes with a GPU, in several zones and of several types.
data "aws_iam_policy_document" "ec2" {
  statement {
    actions = ["sts:AssumeRole"]

    principals {
      type        = "Service"
      identifiers = ["ec2.amazonaws.com"]
    }
  }
}

data "aws_partition" "current" {}

resource "aws_iam_role" "node" {
  name               = "${var.name}-gpu-node"
  assume_role_policy = data.aws_iam_policy_document.ec2.json
}

resource "aws_iam_role_policy_attachment" "node" {
  for_each = toset([
    "AmazonEKSWorkerNodePolicy",
    "AmazonEKS_CNI_Policy",
    "AmazonEC2ContainerRegistryReadOnly",
  ])

  role       = aws_iam_role.node.name
  policy_arn = "arn:${data.aws_partition.current.partition}:iam::aws:policy/${each.key}"
}

resource "aws_eks_node_group" "gpu" {
  cluster_name    = var.cluster
  node_group_name = "${var.name}-gpu-spot"
  node_role_arn   = aws_iam_role.node.arn
  subnet_ids      = var.subnet_ids
  ami_type        = "AL2023_x86_64_NVIDIA"
  capacity_type   = "SPOT" # EKS labels the nodes eks.amazonaws.com/capacityType=SPOT, which the pool asks for
  instance_types  = var.instance_types
  disk_size       = var.disk_gib

  scaling_config {
    min_size     = var.min_nodes
    desired_size = var.min_nodes
    max_size     = var.max_nodes
  }

  # Pods that need no GPU stay away. The pool of infra/kubernetes/pools.yaml tolerates this taint.
  taint {
    key    = "nvidia.com/gpu"
    value  = "present"
    effect = "NO_SCHEDULE"
  }

  lifecycle {
    ignore_changes = [scaling_config[0].desired_size] # Cluster Autoscaler changes it
  }

  depends_on = [aws_iam_role_policy_attachment.node]
}

# The image of `make image`.
resource "aws_ecr_repository" "image" {
  name                 = var.name
  image_tag_mutability = "IMMUTABLE"

  image_scanning_configuration {
    scan_on_push = true
  }
}
