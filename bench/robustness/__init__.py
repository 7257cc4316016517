"""Whether answers stay right: families of models, deployments, random schedules, and a server for a long time."""
