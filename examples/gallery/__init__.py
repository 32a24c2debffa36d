"""Training scripts of several fields, each with and without Holdfast: docs/gallery.md."""
