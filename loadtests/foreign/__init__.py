"""Other people's benchmarks against `loraplex up`, each in an environment of its own."""
