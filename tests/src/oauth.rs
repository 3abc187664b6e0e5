//! OAuth as an application and a browser go through it.

use std::collections::BTreeMap;

use reqwest::header;
use serde_json::{Value, json};

use crate::{Answer, Customer, base64url, percent_decoded, sha256};

/// Where the application waits.
pub const BACK: &str = "https://app.example/back?x=1";
/// What it proves itself with.
pub const VERIFIER: &str = "dBjftJeZ4CVP-mB92K27uhbUJU1p1r_wW1gFWFOEjXk";

/// A registered application, and the person who lets it in.
pub struct App {
    /// Somebody at the node that is asked.
    pub customer: Customer,
    /// The person's address.
    pub email: String,
    password: String,
    /// The client's id.
    pub id: String,
    /// Its secret; empty if it can keep none.
    pub secret: String,
}

/// A value that is a text.
pub fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

/// Fields of a form.
pub type Fields = Vec<(String, String)>;

/// Fields with these values.
pub fn fields(pairs: &[(&str, &str)]) -> Fields {
    pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
}

/// The same with another value, or without it.
pub fn with(mut all: Fields, name: &str, value: Option<&str>) -> Fields {
    all.retain(|(known, _)| known != name);
    all.extend(value.map(|value| (name.to_owned(), value.to_owned())));
    all
}

/// A page: its status, where it sends the browser, its cookie, its hidden fields, its text.
#[expect(missing_docs, reason = "fields are named after what they hold")]
pub struct Page {
    pub status: u16,
    pub location: Option<String>,
    pub cookie: String,
    pub hidden: Fields,
    pub text: String,
    pub policy: String,
}

impl Page {
    /// Of an answer.
    pub async fn of(request: reqwest::RequestBuilder) -> Self {
        let response = request.send().await.expect("the service answers");
        let header = |name: header::HeaderName| {
            let value = response.headers().get(name).and_then(|value| value.to_str().ok());
            value.map(str::to_owned)
        };
        let cookie = header(header::SET_COOKIE).unwrap_or_default();
        let location = header(header::LOCATION);
        let policy = header(header::CONTENT_SECURITY_POLICY).unwrap_or_default();
        let status = response.status().as_u16();
        let text = response.text().await.expect("a page");
        let hidden = text
            .split("<input type=\"hidden\" name=\"")
            .skip(1)
            .filter_map(|rest| {
                let (name, rest) = rest.split_once("\" value=\"")?;
                let (value, _) = rest.split_once("\">")?;
                Some((name.to_owned(), value.replace("&amp;", "&")))
            })
            .collect();
        let cookie = cookie.split(';').next().unwrap_or_default().to_owned();
        Self { status, location, cookie, hidden, text, policy }
    }

    /// What the address that it sends to tells the application.
    pub fn told(&self) -> BTreeMap<String, String> {
        let location = self.location.as_deref().unwrap_or_default();
        let query = location.split_once('?').map_or("", |(_, query)| query);
        let pairs = query.split('&').filter_map(|pair| pair.split_once('='));
        pairs.map(|(name, value)| (name.to_owned(), percent_decoded(value))).collect()
    }
}

impl App {
    /// Registers one, for a person with this login.
    pub async fn new(customer: Customer, email: &str, password: &str, public: bool) -> Self {
        let wanted = json!({
            "name": "Quick <b>App</b>", "redirect_uris": [BACK], "public": public,
            "scopes": ["agents:read", "agents:invoke"],
        });
        let made = customer.post("/v1/oauth/applications", &wanted).await.data(201);
        Self {
            email: email.to_owned(),
            password: password.to_owned(),
            id: text(&made["client_id"]),
            secret: text(&made["client_secret"]),
            customer,
        }
    }

    /// What the application asks for.
    pub fn asked(&self) -> Fields {
        let challenge = base64url(&sha256(VERIFIER.as_bytes()));
        fields(&[
            ("client_id", &self.id),
            ("redirect_uri", BACK),
            ("response_type", "code"),
            ("scope", "agents:read"),
            ("state", "st&te=1"),
            ("code_challenge", &challenge),
            ("code_challenge_method", "S256"),
        ])
    }

    /// The first page.
    pub async fn open(&self, asked: &Fields) -> Page {
        let url = format!("{}/oauth/authorize", self.customer.base_url);
        let request = self.customer.client.get(url).query(asked);
        Page::of(request).await
    }

    /// What comes of a form.
    pub async fn submit(&self, cookie: &str, form: &Fields) -> Page {
        let url = format!("{}/oauth/authorize", self.customer.base_url);
        let request = self.customer.client.post(url).header(header::COOKIE, cookie).form(form);
        Page::of(request).await
    }

    /// The consent page, after a login.
    pub async fn logged_in(&self, asked: &Fields) -> (String, Page) {
        let page = self.open(asked).await;
        assert_eq!(page.status, 200, "{}", page.text);
        let mut form = page.hidden.clone();
        form.extend(fields(&[("email", &self.email), ("password", &self.password)]));
        let consent = self.submit(&page.cookie, &form).await;
        (page.cookie, consent)
    }

    /// Where the person is sent after saying this.
    pub async fn decided(&self, asked: &Fields, decision: &str) -> Page {
        let (cookie, consent) = self.logged_in(asked).await;
        assert_eq!(consent.status, 200, "{}", consent.text);
        let mut form = consent.hidden.clone();
        form.extend(fields(&[("decision", decision)]));
        self.submit(&cookie, &form).await
    }

    /// A code, after a login and consent.
    pub async fn code(&self) -> String {
        let sent = self.decided(&self.asked(), "allow").await;
        assert_eq!(sent.status, 303, "{}", sent.text);
        sent.told()["code"].clone()
    }

    /// What the application says to get tokens for a code.
    pub fn redeeming(&self, code: &str) -> Value {
        let mut body = json!({
            "grant_type": "authorization_code", "client_id": self.id, "code": code,
            "redirect_uri": BACK, "code_verifier": VERIFIER,
        });
        if !self.secret.is_empty() {
            body["client_secret"] = json!(self.secret);
        }
        body
    }

    /// Asks for tokens.
    pub async fn token(&self, body: &Value) -> Answer {
        self.customer.anonymous("/v1/oauth/token", body).await
    }
}
