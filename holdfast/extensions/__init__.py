"""Extensions of Holdfast: each folder is one feature, which no other room imports. See `holdfast.extending`."""
