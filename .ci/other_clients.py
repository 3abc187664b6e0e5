"""Other people's libraries: PyJWT reads our tokens, Authlib completes the OAuth flow, standardwebhooks and
openssl check our deliveries and refuse what was tampered with."""

import html
import http.server
import json
import random
import re
import ssl
import subprocess
import sys
import threading

import jwt
import requests
from authlib.integrations.requests_client import OAuth2Session
from standardwebhooks.webhooks import Webhook, WebhookVerificationError

ready, cert, key_file = sys.argv[1:]
node = json.load(open(ready))
url, ca, live = node["nodes"][0]["base_url"], node["ca_cert"], node["live_key"]
me = requests.Session()
me.verify = ca
me.headers["Authorization"] = f"Bearer {live}"


def data(response, status):
    assert response.status_code == status, (response.status_code, response.text)
    return response.json()["data"]


# PyJWT verifies an access token by our key set.
login = {"email": node["email"], "password": node["password"]}
tokens = data(requests.post(f"{url}/v1/auth/login", json=login, verify=ca), 200)
keys = jwt.PyJWKClient(f"{url}/.well-known/jwks.json", ssl_context=ssl.create_default_context(cafile=ca))
signing = keys.get_signing_key_from_jwt(tokens["access_token"]).key
claims = jwt.decode(tokens["access_token"], signing, algorithms=["EdDSA"], audience=url, issuer=url)
assert claims["email"] == node["email"] and claims["org"] == node["org_id"], claims
assert claims["exp"] - claims["iat"] == 3600 and isinstance(claims["scopes"], list), claims
print("PyJWT verified an access token")

# Authlib completes the authorization code flow with PKCE.
back = "https://app.example/callback"
wanted = {"name": "CI", "redirect_uris": [back], "scopes": ["agents:read"]}
app = data(me.post(f"{url}/v1/oauth/applications", json=wanted), 201)
client = OAuth2Session(
    app["client_id"], app["client_secret"], scope="agents:read", redirect_uri=back,
    code_challenge_method="S256", token_endpoint_auth_method="client_secret_basic",
)
client.verify = ca
verifier = "v" * 64
address, state = client.create_authorization_url(f"{url}/oauth/authorize", code_verifier=verifier)
browser = requests.Session()
browser.verify = ca


def form(page):
    found = re.findall(r'<input type="hidden" name="([^"]*)" value="([^"]*)">', page.text)
    return {name: html.unescape(value) for name, value in found}


page = browser.get(address)
assert page.status_code == 200, page.text
page = browser.post(f"{url}/oauth/authorize", data={**form(page), **login})
assert "Allow CI" in page.text, page.text
page = browser.post(
    f"{url}/oauth/authorize", data={**form(page), "decision": "allow"}, allow_redirects=False
)
sent = page.headers["location"]
assert sent.startswith(back) and f"state={state}" in sent, sent
token = client.fetch_token(f"{url}/v1/oauth/token", authorization_response=sent, code_verifier=verifier)
listed = client.get(f"{url}/v1/agents")
assert listed.status_code == 200 and token["scope"] == "agents:read", (listed.text, token)
renewed = client.refresh_token(f"{url}/v1/oauth/token")
assert renewed["access_token"] != token["access_token"]
print("Authlib completed the OAuth flow")

# standardwebhooks and openssl check deliveries.
came = []


class Receiver(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        came.append((dict(self.headers), body))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain(cert, key_file)
server.socket = context.wrap_socket(server.socket, server_side=True)
threading.Thread(target=server.serve_forever, daemon=True).start()
hook = {"url": f"https://localhost:{server.server_address[1]}/hook", "events": ["agent.*"]}
hook = data(me.post(f"{url}/v1/webhooks", json=hook), 201)
tried = data(me.post(f"{url}/v1/webhooks/{hook['id']}/test"), 200)
assert tried["succeeded"], tried
headers, body = came[0]
headers = {name.lower(): value for name, value in headers.items()}
Webhook(hook["secret"]).verify(body, headers)
message = headers["x-service-timestamp"].encode() + b"." + body
told = subprocess.run(
    ["openssl", "dgst", "-sha256", "-hmac", hook["secret"]], input=message, capture_output=True, check=True
)
assert headers["x-service-signature"] == "sha256=" + told.stdout.decode().split("= ")[1].strip()
dice = random.Random(7)
refused = 0
for _ in range(1000):
    place = dice.randrange(len(body))
    bent = bytearray(body)
    bent[place] ^= 1 << dice.randrange(7)
    try:
        Webhook(hook["secret"]).verify(bytes(bent), headers)
    except WebhookVerificationError:
        refused += 1
assert refused == 1000, refused
print("standardwebhooks and openssl checked a delivery, and 1,000 tampered ones were refused")
