"""What every node needs: settings, the door to NATS, topology, registry, lifecycle, telemetry."""
