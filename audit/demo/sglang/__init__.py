"""SGLang's real scheduler, event loop and model runner on a CPU, without its compiled packages."""
