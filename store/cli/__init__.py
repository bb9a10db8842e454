"""The words of ``ckpt`` that work on a store with no service running: arguments in, text or JSON out."""
