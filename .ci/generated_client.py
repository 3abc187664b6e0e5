"""Deploys and invokes an agent through a client that was generated from the document."""

import io
import sys
import tarfile
import time

work, url, ca, key = sys.argv[1:]
sys.path.insert(0, work)

import httpx  # noqa: E402
from roost_client import AuthenticatedClient  # noqa: E402
from roost_client.api.agents import create_agent, get_agent, list_agents  # noqa: E402
from roost_client.api.clouds import list_clouds  # noqa: E402
from roost_client.api.invocations import invoke_agent  # noqa: E402
from roost_client.models import CreateAgent, InvokeRequest  # noqa: E402

client = AuthenticatedClient(base_url=url, token=key, verify_ssl=ca, raise_on_unexpected_status=True)

clouds = list_clouds.sync(client=client)
cloud = clouds.data.items[0]
assert cloud.provider == "sandbox", cloud

# It takes anything: schemathesis calls it too.
code = b"""def invoke(input, context):
    return {'doubled': input * 2} if isinstance(input, int) else {'seen': input}
"""
packed = io.BytesIO()
with tarfile.open(fileobj=packed, mode="w:gz") as archive:
    entry = tarfile.TarInfo("agent.py")
    entry.size = len(code)
    archive.addfile(entry, io.BytesIO(code))
announced = client.get_httpx_client().post("/v1/uploads", json={"filename": "agent.tar.gz"}).json()["data"]
httpx.put(announced["upload_url"], content=packed.getvalue(), verify=ca).raise_for_status()

wanted = CreateAgent.from_dict({
    "name": "generated",
    "cloud_id": cloud.id,
    "source": {"type": "upload", "archive_url": announced["archive_url"]},
})
created = create_agent.sync(client=client, body=wanted)
assert created.data.status == "created", created
for _ in range(100):
    agent = get_agent.sync(created.data.id, client=client).data
    if agent.status in ("running", "failed"):
        break
    time.sleep(0.2)
assert agent.status == "running", (agent.status, agent.status_reason, agent.deployment)

answer = invoke_agent.sync(created.data.id, client=client, body=InvokeRequest.from_dict({"input": 21}))
assert answer.data.output == {"doubled": 42} or answer.data.output.to_dict() == {"doubled": 42}, answer
assert [one.name for one in list_agents.sync(client=client).data.items] == ["generated"]
print("a generated client deployed and invoked an agent")
