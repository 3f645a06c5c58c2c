"""Text in, text out: token ids, streams of text, chat templates. Knows no model, no request and no HTTP."""
