"""The environment variables that kubelet adds to a container."""

# Names that an installation, or a stranger in the namespace, may give to Services.
OTHER_NAMES = ["baton", "baton-x", "baton-blue-router", "baton-2"]


def variables(objects):
    """What kubelet adds for the Services of a namespace: those of the result, and others with names like ours."""
    found = {}
    services = [thing for thing in objects if thing["kind"] == "Service" and thing["spec"].get("clusterIP") != "None"]
    for service in services:
        found |= links_of(service["metadata"]["name"], service["spec"]["ports"])
        for other in OTHER_NAMES:
            found |= links_of(other, service["spec"]["ports"])
    assert "BATON_X_SERVICE_HOST" in found
    return found


def links_of(service, ports, address="10.96.0.7"):
    """The environment variables that kubelet's envvars.FromServices makes."""
    prefix = service.upper().replace("-", "_")
    first = ports[0]["port"]
    links = {f"{prefix}_SERVICE_HOST": address, f"{prefix}_SERVICE_PORT": str(first)}
    links[f"{prefix}_PORT"] = f"tcp://{address}:{first}"
    for port in ports:
        number, protocol = port["port"], port.get("protocol", "TCP")
        if "name" in port:
            links[f"{prefix}_SERVICE_PORT_{port['name'].upper().replace('-', '_')}"] = str(number)
        stem = f"{prefix}_PORT_{number}_{protocol}"
        links |= {
            stem: f"{protocol.lower()}://{address}:{number}",
            f"{stem}_PROTO": protocol.lower(),
            f"{stem}_PORT": str(number),
            f"{stem}_ADDR": address,
        }
    return links
