"""Keys and values in host memory, statistics on the device."""
