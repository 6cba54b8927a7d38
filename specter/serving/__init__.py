"""An OpenAI-compatible server over one engine; needs the extra `serve`."""
