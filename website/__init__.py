"""The docs site: the project's Markdown as it is, made into pages, and the built pages checked."""
