# Holdfast alone decides which checkpoint of a run to keep. This deletes only what no reader can see: versions that
# Holdfast has deleted or replaced, and parts of uploads that were never completed.
resource "aws_s3_bucket_lifecycle_configuration" "runs" {
  bucket     = aws_s3_bucket.runs.id
  depends_on = [aws_s3_bucket_versioning.runs]

  rule {
    id     = "deleted-versions"
    status = "Enabled"

    filter {}

    noncurrent_version_expiration {
      noncurrent_days = var.noncurrent_days
    }

    expiration {
      expired_object_delete_marker = true
    }
  }

  rule {
    id     = "incomplete-uploads"
    status = "Enabled"

    filter {}

    abort_incomplete_multipart_upload {
      days_after_initiation = 7
    }
  }
}
