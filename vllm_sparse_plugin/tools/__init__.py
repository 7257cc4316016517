"""What measures, tunes and trains models: no server imports it."""
