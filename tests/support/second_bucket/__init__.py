from holdfast.extending import Command, Extension

extension = Extension(
    "second_bucket",
    settings="second_bucket.copies:SecondBucket",
    commands=(Command("second-bucket", "second_bucket.copies:show", "Compare the commits of the second store."),),
    observers="second_bucket.copies:observe",
    admission="second_bucket.copies:refuse",
)
