//! A hundred ways to be let in without right, by name (RFC 9700, RFC 8725, RFC 6750); none of them works.

use std::collections::BTreeSet;

use hmac::{Hmac, KeyInit as _, Mac as _};
use rcgen::SigningKey as _;
use reqwest::{Method, header};
use serde_json::{Value, json};
use tests::{
    Customer, Node, base64url, from_base64url,
    oauth::{App, BACK, VERIFIER, fields, text, with},
};

/// Attacks of this file at least.
const NAMED: [usize; 2] = [55, 50];

fn encode(value: &Value) -> String {
    base64url(value.to_string().as_bytes())
}

fn decode(part: &str) -> Value {
    serde_json::from_slice(&from_base64url(part)).expect("JSON")
}

fn changed(value: &Value, name: &str, to: Value) -> Value {
    let mut value = value.clone();
    value[name] = to;
    value
}

/// A keyed hash as an algorithm's name says.
fn hashed(algorithm: &str, key: &[u8], message: &str) -> Vec<u8> {
    macro_rules! of {
        ($hash:ty) => {{
            let mut mac = Hmac::<$hash>::new_from_slice(key).expect("any length fits");
            mac.update(message.as_bytes());
            mac.finalize().into_bytes().to_vec()
        }};
    }
    match algorithm {
        "HS256" => of!(sha2::Sha256),
        "HS384" => of!(sha2::Sha384),
        _ => of!(sha2::Sha512),
    }
}

/// A good token in its parts, and what is known of its key.
struct Token {
    parts: [String; 3],
    header: Value,
    claims: Value,
    public: String,
}

impl Token {
    async fn of(customer: &Customer, token: &str) -> Self {
        let parts: Vec<String> = token.split('.').map(str::to_owned).collect();
        let [one, two, three] = parts.try_into().expect("three parts");
        let jwks = customer.bare("/.well-known/jwks.json").await;
        let (header, claims) = (decode(&one), decode(&two));
        Self { header, claims, public: text(&jwks["keys"][0]["x"]), parts: [one, two, three] }
    }

    fn with_header(&self, header: &Value) -> String {
        format!("{}.{}.{}", encode(header), self.parts[1], self.parts[2])
    }

    fn with_claims(&self, claims: &Value) -> String {
        format!("{}.{}.{}", self.parts[0], encode(claims), self.parts[2])
    }

    /// Another header and other claims, signed with a key of the attacker's own.
    fn signed(&self, header: &Value, claims: &Value, key: &rcgen::KeyPair) -> String {
        let message = format!("{}.{}", encode(header), encode(claims));
        let signature = key.sign(message.as_bytes()).expect("signed");
        format!("{message}.{}", base64url(&signature))
    }

    /// The public key taken for a shared secret (RFC 8725, 2.1).
    fn confused(&self) -> Vec<(String, String)> {
        let raw = from_base64url(&self.public);
        let der = [&[0x30, 0x2a, 0x30, 5, 6, 3, 0x2b, 0x65, 0x70, 3, 0x21, 0], &*raw].concat();
        let jwk = json!({ "kty": "OKP", "crv": "Ed25519", "x": self.public }).to_string();
        let mut all = vec![];
        for algorithm in ["HS256", "HS384", "HS512"] {
            for (name, key) in [
                ("raw", raw.clone()),
                ("base64url", self.public.clone().into_bytes()),
                ("DER", der.clone()),
                ("JWK", jwk.clone().into_bytes()),
                ("empty", vec![]),
            ] {
                let header = changed(&self.header, "alg", json!(algorithm));
                let message = format!("{}.{}", encode(&header), self.parts[1]);
                let mac = base64url(&hashed(algorithm, &key, &message));
                all.push((format!("{algorithm} with the {name} key"), format!("{message}.{mac}")));
            }
        }
        all
    }

    /// Algorithms that are none, others than said, or nonsense.
    fn of_other_algorithms(&self) -> Vec<(String, String)> {
        let mut all = vec![];
        for algorithm in ["none", "None", "NONE", "nOnE", ""] {
            let header = changed(&self.header, "alg", json!(algorithm));
            all.push((format!("alg {algorithm:?}, signed"), self.with_header(&header)));
            let bare = format!("{}.{}.", encode(&header), self.parts[1]);
            all.push((format!("alg {algorithm:?}, no signature"), bare));
        }
        for algorithm in ["RS256", "PS256", "ES256", "ES256K", "EdDSA2", "eddsa", "Ed448"] {
            let header = changed(&self.header, "alg", json!(algorithm));
            all.push((format!("alg {algorithm}"), self.with_header(&header)));
        }
        for odd in [json!(null), json!(7), json!(["EdDSA"]), json!({ "EdDSA": true })] {
            let header = changed(&self.header, "alg", odd.clone());
            all.push((format!("alg {odd}"), self.with_header(&header)));
        }
        all
    }

    /// Keys that the attacker brings (RFC 8725, 2.6 and 3.10).
    fn with_own_keys(&self) -> Vec<(String, String)> {
        let key = rcgen::KeyPair::generate_for(&rcgen::PKCS_ED25519).expect("a key");
        let own = base64url(key.public_key_raw());
        let jwk = json!({ "kty": "OKP", "crv": "Ed25519", "x": own });
        let claims = changed(&self.claims, "scopes", json!(["admin:*"]));
        let with = |name: &str, value: Value| changed(&self.header, name, value);
        [
            ("the known kid and another key", self.header.clone()),
            ("a key in the header", with("jwk", jwk.clone())),
            ("keys at an address", with("jku", json!("https://evil.example/jwks.json"))),
            ("a certificate in the header", with("x5c", json!([own]))),
            ("a certificate at an address", with("x5u", json!("https://evil.example/cert"))),
            ("an unknown kid", with("kid", json!("0000000000000000"))),
            ("a path for a kid", with("kid", json!("../../../../dev/null"))),
            ("SQL for a kid", with("kid", json!("x' UNION SELECT 'key"))),
            ("an empty kid", with("kid", json!(""))),
            ("no kid", with("kid", Value::Null)),
            ("a number for a kid", with("kid", json!(1))),
            ("an object for a kid", with("kid", jwk)),
        ]
        .map(|(name, header)| (name.to_owned(), self.signed(&header, &claims, &key)))
        .into()
    }

    /// Good parts, put together wrongly.
    fn misshapen(&self, other: &str) -> Vec<(String, String)> {
        let [header, claims, signature] = &self.parts;
        let theirs: Vec<&str> = other.split('.').collect();
        let good = format!("{header}.{claims}.{signature}");
        let signed = from_base64url(signature);
        let mut high = signed.clone();
        // S + L is the same number to a careless verifier (RFC 8032, 5.1.7).
        add_order(&mut high[32..]);
        let critical = changed(&self.header, "crit", json!(["exp"]));
        let unencoded = changed(&critical, "b64", json!(false));
        let zipped = changed(&self.header, "zip", json!("DEF"));
        let json_form = json!({ "protected": header, "payload": claims, "signature": signature });
        let long = "e".repeat(3000);
        [
            ("another's signature", format!("{header}.{claims}.{}", theirs[2])),
            ("another's claims", format!("{header}.{}.{signature}", theirs[1])),
            ("another's header", format!("{}.{claims}.{signature}", encode(&json!({})))),
            ("no signature", format!("{header}.{claims}.")),
            ("two parts", format!("{header}.{claims}")),
            ("four parts", format!("{good}.{signature}")),
            ("five parts", format!("{good}.{signature}.{signature}")),
            ("half a signature", format!("{header}.{claims}.{}", base64url(&signed[..32]))),
            ("zeros", format!("{header}.{claims}.{}", base64url(&[0; 64]))),
            ("a shifted signature", format!("{header}.{claims}.{}", base64url(&high))),
            ("a longer signature", format!("{good}AAAA")),
            ("padding", format!("{good}==")),
            ("a blank inside", format!("{header}. {claims}.{signature}")),
            ("standard base64", good.replace('-', "+").replace('_', "/") + "+"),
            ("an unknown crit", self.with_header(&critical)),
            ("b64 false", self.with_header(&unencoded)),
            ("a zipped payload", self.with_header(&zipped)),
            ("JSON serialization", base64url(json_form.to_string().as_bytes())),
            ("a huge payload", format!("{header}.{long}.{signature}")),
            ("a bomb of dots", "ey".to_owned() + &".".repeat(3000)),
            ("nothing but dots", "ey..".to_owned()),
        ]
        .map(|(name, token)| (name.to_owned(), token))
        .into()
    }

    /// Claims that say more than they did.
    fn with_more(&self) -> Vec<(String, String)> {
        [
            ("another organization", "org", json!("org_00000000000000000000000000")),
            ("more scopes", "scopes", json!(["admin:*"])),
            ("a later end", "exp", json!(9_999_999_999_u64)),
            ("no end", "exp", Value::Null),
            ("another person", "sub", json!("usr_00000000000000000000000001")),
            ("another issuer", "iss", json!("https://evil.example")),
            ("another audience", "aud", json!("https://evil.example")),
            ("another session", "sid", json!("ses_00000000000000000000000000")),
            ("the other mode", "livemode", json!(false)),
        ]
        .map(|(what, name, value)| {
            (what.to_owned(), self.with_claims(&changed(&self.claims, name, value)))
        })
        .into()
    }
}

/// Adds the order of Ed25519's group to a number, least byte first.
fn add_order(number: &mut [u8]) {
    const ORDER: [u8; 32] = [
        0xed, 0xd3, 0xf5, 0x5c, 0x1a, 0x63, 0x12, 0x58, 0xd6, 0x9c, 0xf7, 0xa2, 0xde, 0xf9, 0xde,
        0x14, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x10,
    ];
    let mut carry = 0;
    for (byte, order) in number.iter_mut().zip(ORDER) {
        let sum = u16::from(*byte) + u16::from(order) + carry;
        *byte = (sum & 0xff) as u8;
        carry = sum >> 8;
    }
}

fn strangers_welcome() -> Node {
    Node::with(&[("ROOST_RATE_LIMIT__UNAUTHENTICATED_PER_MINUTE", "100000")])
}

async fn log_in(node: &Node) -> Value {
    let login = json!({ "email": node.email, "password": node.password });
    node.customer().anonymous("/v1/auth/login", &login).await.data(200)
}

fn distinct(names: &[String], least: usize) {
    let all: BTreeSet<&String> = names.iter().collect();
    assert!(all.len() == names.len() && all.len() >= least, "{} attacks: {names:?}", all.len());
}

#[tokio::test]
async fn no_token_is_taken_that_this_service_did_not_make_for_this_use() {
    let (node, elsewhere) = (strangers_welcome(), strangers_welcome());
    let me = node.customer();
    let tokens = log_in(&node).await;
    let good = text(&tokens["access_token"]);
    let token = Token::of(&me, &good).await;
    for name in ["sub", "email", "org", "scopes", "iat", "exp", "iss", "jti", "aud", "sid"] {
        assert!(token.claims.get(name).is_some(), "{name} is missing: {}", token.claims);
    }
    assert_eq!(token.header["alg"], "EdDSA");
    let another = text(&log_in(&node).await["access_token"]);
    let app = App::new(node.customer(), &node.email, &node.password, false).await;
    let invited = json!({ "email": "new@example.com", "role": "viewer" });
    let invited = me.post("/v1/invitations", &invited).await.data(201);
    let mut attacks: Vec<(String, String)> = [
        ("a token of another cluster", text(&log_in(&elsewhere).await["access_token"])),
        ("a key of another cluster", elsewhere.customer().key),
        ("a refresh token", text(&tokens["refresh_token"])),
        ("an authorization code", app.code().await),
        ("an application's secret", app.secret.clone()),
        ("an application's id", app.id.clone()),
        ("an invitation's token", text(&invited["token"])),
        ("the password", node.password.clone()),
        ("a session's id", text(&token.claims["sid"])),
        ("a token's id", text(&token.claims["jti"])),
        ("the public key", token.public.clone()),
        ("a key of the other mode's name", me.key.replace("ic_live_", "ic_test_")),
        ("half a key", me.key[..30].to_owned()),
        ("a key and more", format!("{}x", me.key)),
        ("a key in capitals", me.key.to_uppercase()),
        ("nothing", String::new()),
    ]
    .map(|(name, token)| (name.to_owned(), token))
    .into();
    attacks.extend(token.of_other_algorithms());
    attacks.extend(token.confused());
    attacks.extend(token.with_own_keys());
    attacks.extend(token.misshapen(&another));
    attacks.extend(token.with_more());
    distinct(&attacks.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>(), NAMED[0]);
    for (name, token) in &attacks {
        for path in ["/v1/clouds", "/v1/auth/me"] {
            let answer = node.caller(token).get(path).await;
            assert_eq!(answer.status, 401, "{name}: {}", answer.body);
        }
        let introspected = json!({
            "token": token, "client_id": app.id, "client_secret": app.secret,
        });
        let told = me.anonymous("/v1/oauth/introspect", &introspected).await;
        let is_known = name == "a refresh token" || told.status != 200;
        assert!(is_known || told.body["data"]["active"] == false, "{name}: {}", told.body);
    }
    // Credentials are heard in headers alone (RFC 6750, 2.3; RFC 9700, 4.3.2), and only one at a time.
    let request = |path: &str| me.client.get(format!("{}{path}", me.base_url));
    let in_query = format!("/v1/clouds?access_token={good}&api_key={}", me.key);
    me.send(request(&in_query)).await.refused(401, "UNAUTHENTICATED");
    let cookie = format!("access_token={good}; Authorization=Bearer {good}");
    let cookie = request("/v1/clouds").header(header::COOKIE, cookie);
    me.send(cookie).await.refused(401, "UNAUTHENTICATED");
    let basic = request("/v1/clouds").basic_auth(&good, Some(&good));
    me.send(basic).await.refused(401, "UNAUTHENTICATED");
    let both = request("/v1/clouds").bearer_auth(&good).header("x-api-key", &me.key);
    me.send(both).await.refused(400, "INVALID_REQUEST");
    node.caller(&good).get("/v1/clouds").await.data(200);
}

/// What a person's browser may be made to ask for; an address that is not the application's gets nothing.
const ADDRESSES: [(&str, &str); 20] = [
    ("another host", "https://evil.example/back?x=1"),
    ("a longer path", "https://app.example/back/more?x=1"),
    ("a shorter path", "https://app.example/"),
    ("another query", "https://app.example/back?x=2"),
    ("no query", "https://app.example/back"),
    ("a slash at the end", "https://app.example/back/?x=1"),
    ("a climb", "https://app.example/a/../back?x=1"),
    ("an encoded climb", "https://app.example/%2e%2e/back?x=1"),
    ("a host that begins alike", "https://app.example.evil.example/back?x=1"),
    ("a host that ends alike", "https://evilapp.example/back?x=1"),
    ("a user that looks like the host", "https://app.example@evil.example/back?x=1"),
    ("a backslash", "https://evil.example\\@app.example/back?x=1"),
    ("another port", "https://app.example:8443/back?x=1"),
    ("the usual port", "https://app.example:443/back?x=1"),
    ("capitals", "https://APP.example/back?x=1"),
    ("a dot behind the host", "https://app.example./back?x=1"),
    ("plain http", "http://app.example/back?x=1"),
    ("a script", "javascript:alert(1)//https://app.example/back?x=1"),
    ("a fragment", "https://app.example/back?x=1#token"),
    ("a line break", "https://app.example/back?x=1\r\nSet-Cookie: a=b"),
];

#[tokio::test]
async fn no_code_goes_astray_and_no_token_is_given_for_a_stolen_one() {
    let node = strangers_welcome();
    let new_app =
        async |public| App::new(node.customer(), &node.email, &node.password, public).await;
    let (app, other, public) = (new_app(false).await, new_app(false).await, new_app(true).await);
    let mut names: Vec<String> = vec![];
    for (name, address) in ADDRESSES {
        let page = app.open(&with(app.asked(), "redirect_uri", Some(address))).await;
        assert_eq!((page.status, page.location), (400, None), "{name}");
        names.push(name.to_owned());
    }

    let code = app.code().await;
    let good = app.redeeming(&code);
    let set = |name: &str, value: Value| changed(&good, name, value);
    let long = "v".repeat(129);
    let theirs = changed(&set("client_id", json!(other.id)), "client_secret", json!(other.secret));
    let cases = [
        ("mix-up: another application", theirs),
        ("another application without its secret", set("client_id", json!(other.id))),
        ("another's secret", set("client_secret", json!(other.secret))),
        ("the id for a secret", set("client_secret", json!(app.id))),
        ("an empty secret", set("client_secret", json!(""))),
        ("no secret", set("client_secret", Value::Null)),
        ("a public application", set("client_id", json!(public.id))),
        ("downgrade: no verifier", set("code_verifier", Value::Null)),
        ("an empty verifier", set("code_verifier", json!(""))),
        ("the challenge for a verifier", set("code_verifier", json!(app.asked()[5].1))),
        ("a short verifier", set("code_verifier", json!(&VERIFIER[..42]))),
        ("a long verifier", set("code_verifier", json!(long))),
        ("a verifier and a blank", set("code_verifier", json!(format!("{VERIFIER} ")))),
        ("another address", set("redirect_uri", json!("https://evil.example/"))),
        ("an address like it", set("redirect_uri", json!("https://app.example/back"))),
        ("no address", set("redirect_uri", Value::Null)),
        ("half a code", set("code", json!(&code[..code.len() / 2]))),
        ("a code and more", set("code", json!(format!("{code}A")))),
        ("a code in capitals", set("code", json!(code.to_uppercase()))),
        ("a huge code", set("code", json!("c".repeat(20_000)))),
        ("a list of codes", set("code", json!([code]))),
        ("the password grant", set("grant_type", json!("password"))),
        ("the implicit grant", set("grant_type", json!("token"))),
        (
            "a JWT for a grant",
            set("grant_type", json!("urn:ietf:params:oauth:grant-type:jwt-bearer")),
        ),
        (
            "token exchange",
            set("grant_type", json!("urn:ietf:params:oauth:grant-type:token-exchange")),
        ),
        ("an assertion for a secret", set("client_assertion", json!("ey.ey."))),
    ];
    for (name, body) in cases {
        let answer = app.token(&body).await;
        assert!(matches!(answer.status, 400 | 401), "{name}: {}", answer.body);
        assert!(!answer.body.to_string().contains("access_token"), "{name}: {}", answer.body);
        names.push(name.to_owned());
    }
    let tokens = app.token(&good).await.data(200);

    // Tokens are for whom they were made for, and for no more than that.
    let refresh = json!({
        "grant_type": "refresh_token", "refresh_token": tokens["refresh_token"],
        "client_id": app.id, "client_secret": app.secret,
    });
    let client = app.customer.client.clone();
    let at = |path: &str| format!("{}{path}", app.customer.base_url);
    for (name, body) in [
        (
            "refresh by another",
            changed(
                &changed(&refresh, "client_id", json!(other.id)),
                "client_secret",
                json!(other.secret),
            ),
        ),
        (
            "refresh by nobody",
            changed(&changed(&refresh, "client_id", Value::Null), "client_secret", Value::Null),
        ),
        ("refresh for more", changed(&refresh, "scope", json!("agents:read admin:*"))),
        (
            "refresh with an access token",
            changed(&refresh, "refresh_token", tokens["access_token"].clone()),
        ),
        ("refresh with a code", changed(&refresh, "refresh_token", json!(code))),
        (
            "itself for more",
            json!({ "grant_type": "client_credentials", "scope": "admin:*",
            "client_id": app.id, "client_secret": app.secret }),
        ),
        (
            "a public one for itself",
            json!({ "grant_type": "client_credentials", "client_id": public.id }),
        ),
    ] {
        let answer = app.token(&body).await;
        assert!(matches!(answer.status, 400 | 401), "{name}: {}", answer.body);
        names.push(name.to_owned());
    }
    for (name, request, wanted) in [
        ("by GET", client.get(at("/v1/oauth/token")).query(&fields(&[("code", &code)])), 405),
        ("in the query", client.post(at("/v1/oauth/token?grant_type=refresh_token")).body(""), 415),
        (
            "as text",
            client
                .post(at("/v1/oauth/token"))
                .header("content-type", "text/plain")
                .body(good.to_string()),
            415,
        ),
        (
            "secret by two ways",
            client.post(at("/v1/oauth/token")).basic_auth(&app.id, Some("x")).json(&refresh),
            400,
        ),
        (
            "looked at by nobody",
            client
                .post(at("/v1/oauth/introspect"))
                .form(&fields(&[("token", &text(&tokens["access_token"]))])),
            401,
        ),
    ] {
        let answer = app.customer.send(request).await;
        assert!(answer.status == wanted || answer.status == 401, "{name}: {}", answer.body);
        names.push(name.to_owned());
    }
    // Another application can't end this one's session.
    let theirs = json!({ "token": tokens["refresh_token"], "client_id": other.id,
        "client_secret": other.secret });
    app.customer.anonymous("/v1/oauth/revoke", &theirs).await;
    let narrow = json!({ "scope": "agents:read" });
    let next = app.token(&changed(&refresh, "scope", narrow["scope"].clone())).await.data(200);

    // A code that comes twice ends what came of it the first time.
    app.token(&good).await.refused(400, "INVALID_GRANT");
    names.push("a code twice".to_owned());
    let spent = node.caller(&text(&next["access_token"]));
    spent.get("/v1/agents").await.refused(401, "TOKEN_EXPIRED");
    distinct(&names, NAMED[1]);
    let put = app.customer.client.request(Method::PUT, at("/v1/oauth/token")).body(BACK);
    assert_eq!(app.customer.send(put).await.status, 405);
}
