"""``python -m pasta_otel``."""

from pasta_otel.cli import main

if __name__ == "__main__":
    main()
