"""Messages to token ids and back: renderers, chat templates, parsing, images."""
