"""The access rights that each verb (method) of a store needs, for each kind of storage.

Sources: "Actions, resources, and condition keys for Amazon S3"; "IAM permissions for JSON methods" of Google Cloud
Storage; "Permissions for calling data operations" of Azure Storage.
"""

from collections.abc import Mapping

from holdfast.store.opening import STORES
from holdfast.store.permission import names_code

S3_LIST, S3_GET, S3_PUT, S3_DELETE = "s3:ListBucket", "s3:GetObject", "s3:PutObject", "s3:DeleteObject"
S3_UPLOADS, S3_ABORT = "s3:ListBucketMultipartUploads", "s3:AbortMultipartUpload"
S3_UPLOAD = (S3_PUT, S3_GET, S3_LIST)
GCS_LIST, GCS_GET = "storage.objects.list", "storage.objects.get"
GCS_CREATE, GCS_DELETE = "storage.objects.create", "storage.objects.delete"
BLOBS = "Microsoft.Storage/storageAccounts/blobServices/containers/blobs"
AZURE_READ, AZURE_WRITE, AZURE_DELETE = f"{BLOBS}/read", f"{BLOBS}/write", f"{BLOBS}/delete"
READ_FOLDER, WRITE_FOLDER, READ_FILE = "r-x on the folder", "-wx on the folder", "r-- on the file"

# For each verb: the rights that it needs on a disk, S3, Google Cloud Storage and Azure Blob Storage.
_TABLE: dict[str, tuple[tuple[str, ...], ...]] = {
    "list": ((READ_FOLDER,), (S3_LIST,), (GCS_LIST,), (AZURE_READ,)),
    # Without the right to list, S3 answers 403 instead of 404 for a name that doesn't exist.
    "exists": ((READ_FOLDER,), (S3_LIST, S3_GET), (GCS_GET,), (AZURE_READ,)),
    "delete": ((WRITE_FOLDER,), (S3_DELETE,), (GCS_DELETE,), (AZURE_DELETE,)),
    "abort": ((), (S3_ABORT,), (), ()),
    "create": ((WRITE_FOLDER,), (S3_PUT,), (GCS_CREATE,), (AZURE_WRITE,)),
    "read": ((READ_FILE,), (S3_GET,), (GCS_GET,), (AZURE_READ,)),
    "read a range": ((READ_FILE,), (S3_GET,), (GCS_GET,), (AZURE_READ,)),
    "look": ((READ_FOLDER,), (S3_GET,), (GCS_GET,), (AZURE_READ,)),
    "list after": ((READ_FOLDER,), (S3_LIST,), (GCS_LIST,), (AZURE_READ,)),
    # If the name is taken, its file is read, to check whether an earlier try of the same write has created it.
    "create again": ((WRITE_FOLDER,), (S3_PUT, S3_GET), (GCS_CREATE, GCS_GET), (AZURE_WRITE, AZURE_READ)),
    # Google Cloud counts the replacement of an object as a deletion of the old object.
    "replace": ((WRITE_FOLDER,), (S3_PUT,), (GCS_CREATE, GCS_DELETE), (AZURE_WRITE,)),
    "upload": ((WRITE_FOLDER,), S3_UPLOAD, (GCS_CREATE, GCS_GET), (AZURE_WRITE, AZURE_READ)),
    "upload again": ((WRITE_FOLDER,), (*S3_UPLOAD, S3_ABORT), (GCS_CREATE, GCS_GET), (AZURE_WRITE, AZURE_READ)),
    "copy": ((WRITE_FOLDER,), (S3_GET, S3_PUT), (GCS_GET, GCS_CREATE), ()),
    "sweep": ((READ_FOLDER, WRITE_FOLDER), (S3_UPLOADS, S3_ABORT), (), ()),
    "delete a folder": (
        (READ_FOLDER, WRITE_FOLDER), (S3_LIST, S3_DELETE), (GCS_LIST, GCS_DELETE), (AZURE_READ, AZURE_DELETE),
    ),
}  # fmt: skip
KINDS = ("disk", "s3", "gcs", "azure")
RIGHTS: dict[str, Mapping[str, tuple[str, ...]]] = {
    kind: {verb: rights[number] for verb, rights in _TABLE.items()} for number, kind in enumerate(KINDS)
}


def find_rights(url: str) -> Mapping[str, tuple[str, ...]]:
    """Return the rights that each verb needs on a URL's store; empty for a store in memory or a user's class."""
    scheme, separator, _ = url.partition("://")
    if scheme == "memory" or names_code(url):
        return {}
    return RIGHTS[STORES[scheme][0] if separator and scheme in STORES else "disk"]
