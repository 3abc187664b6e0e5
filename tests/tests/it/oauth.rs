//! Third parties come in through OAuth: people agree on a page, codes become tokens, and nothing of
//! what attackers try works.

use reqwest::Method;
use serde_json::{Value, json};
use tests::{
    Node,
    oauth::{App, BACK, Fields, Page, fields, text, with},
};

async fn app_of(node: &Node, public: bool) -> App {
    App::new(node.customer(), &node.email, &node.password, public).await
}

fn open_node() -> Node {
    Node::with(&[("ROOST_RATE_LIMIT__UNAUTHENTICATED_PER_MINUTE", "100000")])
}

#[tokio::test]
async fn a_person_lets_an_application_in() {
    let node = open_node();
    let app = app_of(&node, false).await;
    let page = app.open(&app.asked()).await;
    for part in
        ["default-src 'none'", "frame-ancestors 'none'", "form-action 'self' https://app.example"]
    {
        assert!(page.policy.contains(part), "{}", page.policy);
    }
    assert!(page.text.contains("Quick &lt;b&gt;App") && !page.text.contains("<b>App"), "escaped");
    assert!(page.cookie.starts_with("__Host-"), "{}", page.cookie);

    let sent = app.decided(&app.asked(), "allow").await;
    let told = sent.told();
    assert!(
        sent.location
            .as_ref()
            .is_some_and(|to| to.starts_with("https://app.example/back?x=1&code="))
    );
    assert_eq!(told["state"], "st&te=1");
    assert_eq!(told["iss"], app.customer.base_url);

    let answer = app.token(&app.redeeming(&told["code"])).await;
    assert_eq!(answer.header("cache-control"), Some("no-store"));
    let tokens = answer.data(200);
    assert_eq!(
        (text(&tokens["token_type"]), text(&tokens["scope"])),
        ("Bearer".into(), "agents:read".into())
    );
    let third = node.caller(&text(&tokens["access_token"]));
    third.get("/v1/agents").await.data(200);
    third.get("/v1/clouds").await.refused(403, "INSUFFICIENT_SCOPE");
    third.get("/v1/api-keys").await.refused(403, "INSUFFICIENT_SCOPE");

    // A code is good once; its second use ends what came of the first.
    app.token(&app.redeeming(&told["code"])).await.refused(400, "INVALID_GRANT");
    let refresh = json!({
        "grant_type": "refresh_token", "refresh_token": tokens["refresh_token"],
        "client_id": app.id, "client_secret": app.secret,
    });
    app.token(&refresh).await.refused(400, "INVALID_GRANT");

    // What the person agreed to is in the log of their organization.
    let rows = node.customer().get("/v1/audit-log?action=authorize").await.data(200);
    let agreed = format!("/oauth/authorize?client_id={}", app.id);
    let mut rows = rows["items"].as_array().expect("rows").iter();
    let row = rows.find(|row| row["target"] == agreed).expect("a row");
    assert_eq!((&row["actor"]["type"], &row["outcome"]), (&json!("user"), &json!("succeeded")));

    let no = app.decided(&app.asked(), "deny").await.told();
    assert_eq!((no["error"].as_str(), no["state"].as_str()), ("access_denied", "st&te=1"));
}

#[tokio::test]
async fn tokens_are_refreshed_looked_at_and_revoked_in_both_dialects() {
    let node = open_node();
    let app = app_of(&node, false).await;
    let tokens = app.token(&app.redeeming(&app.code().await)).await.data(200);
    let form = |path: &'static str, pairs: Fields| {
        let request = app.customer.client.post(format!("{}{path}", app.customer.base_url));
        let basic = request.basic_auth(&app.id, Some(&app.secret)).form(&pairs);
        app.customer.send(basic)
    };
    let refresh = text(&tokens["refresh_token"]);
    let pairs = fields(&[("grant_type", "refresh_token"), ("refresh_token", &refresh)]);
    let next = form("/v1/oauth/token", pairs.clone()).await;
    assert_eq!(next.status, 200, "{}", next.body);
    assert!(next.body.get("success").is_none(), "the standard's own shape: {}", next.body);
    let access = text(&next.body["access_token"]);
    node.caller(&access).get("/v1/agents").await.data(200);
    let known = form("/v1/oauth/introspect", fields(&[("token", &access)])).await.body;
    assert_eq!((&known["active"], text(&known["username"])), (&json!(true), app.email.clone()));
    let newest = text(&next.body["refresh_token"]);
    let known = form("/v1/oauth/introspect", fields(&[("token", &newest)])).await.body;
    assert_eq!(known["active"], true);
    form("/v1/oauth/revoke", fields(&[("token", &newest)])).await;
    let known = form("/v1/oauth/introspect", fields(&[("token", &newest)])).await.body;
    assert_eq!(known, json!({ "active": false }));
    node.caller(&access).get("/v1/agents").await.refused(401, "TOKEN_EXPIRED");
    let pairs = fields(&[("grant_type", "refresh_token"), ("refresh_token", &newest)]);
    let refused = form("/v1/oauth/token", pairs).await;
    assert_eq!((refused.status, text(&refused.body["error"])), (400, "invalid_grant".to_owned()));
    form("/v1/oauth/revoke", fields(&[("token", "nonsense")])).await;

    let itself = fields(&[("grant_type", "client_credentials"), ("scope", "agents:read")]);
    let own = form("/v1/oauth/token", itself.clone()).await;
    // Who proves itself, in a header or in the body, is no stranger: the call counts for its organization.
    let limit = |answer: &tests::Answer| answer.header("x-ratelimit-limit").map(str::to_owned);
    let organizations = limit(&node.customer().get("/v1/agents").await);
    let itself_with = |secret: &str| json!({ "grant_type": "client_credentials", "client_id": app.id, "client_secret": secret });
    let with_body = app.token(&itself_with(&app.secret)).await;
    let shown = [("client_id", app.id.as_str()), ("client_secret", app.secret.as_str())];
    let with_form = app.customer.client.post(format!("{}/v1/oauth/token", app.customer.base_url));
    let with_form = with_form.form(&[itself.clone(), fields(&shown)].concat());
    let with_form = app.customer.send(with_form).await;
    for answer in [&own, &with_body, &with_form] {
        assert_eq!((answer.status, limit(answer)), (200, organizations.clone()));
    }
    let strangers = app.token(&itself_with("no secret of ours")).await;
    assert_eq!(strangers.status, 401);
    assert_ne!(limit(&strangers), organizations);
    let own = own.body;
    assert!(own.get("refresh_token").is_none(), "{own}");
    let me = node.caller(&text(&own["access_token"])).get("/v1/auth/me").await.data(200);
    assert_eq!((text(&me["type"]), text(&me["id"])), ("application".to_owned(), app.id.clone()));
    let spent = text(&own["access_token"]);
    form("/v1/oauth/revoke", fields(&[("token", &spent)])).await;
    node.caller(&spent).get("/v1/agents").await.refused(401, "TOKEN_EXPIRED");
    let last = text(&form("/v1/oauth/token", itself).await.body["access_token"]);
    node.caller(&last).get("/v1/agents").await.data(200);
    app.customer.delete(&format!("/v1/oauth/applications/{}", app.id)).await.data(200);
    node.caller(&last).get("/v1/agents").await.refused(401, "INVALID_API_KEY");
    let metadata = app.customer.bare("/.well-known/oauth-authorization-server").await;
    assert_eq!(metadata["issuer"], app.customer.base_url);
    assert_eq!(metadata["code_challenge_methods_supported"], json!(["S256"]));
}

#[tokio::test]
async fn what_is_wrong_with_a_request_is_told_to_whom_it_concerns() {
    let node = open_node();
    let app = app_of(&node, false).await;
    let good = app.asked();
    // Client or address wrong: nobody is sent anywhere.
    let mut twice = good.clone();
    twice.extend(fields(&[("redirect_uri", "https://evil.example")]));
    let unknown = "app_00000000000000000000000000";
    for (name, asked) in [
        ("no client", with(good.clone(), "client_id", None)),
        ("an unknown client", with(good.clone(), "client_id", Some(unknown))),
        ("no address", with(good.clone(), "redirect_uri", None)),
        ("a longer address", with(good.clone(), "redirect_uri", Some(&format!("{BACK}&y=2")))),
        ("a shorter address", with(good.clone(), "redirect_uri", Some("https://app.example/back"))),
        ("another host", with(good.clone(), "redirect_uri", Some("https://evil.example/back?x=1"))),
        (
            "a host that begins alike",
            with(good.clone(), "redirect_uri", Some("https://app.example.evil.example/back?x=1")),
        ),
        (
            "a user in the address",
            with(good.clone(), "redirect_uri", Some("https://app.example@evil.example/back?x=1")),
        ),
        ("another case", with(good.clone(), "redirect_uri", Some("https://APP.example/back?x=1"))),
        ("a climb", with(good.clone(), "redirect_uri", Some("https://app.example/a/../back?x=1"))),
        ("plain http", with(good.clone(), "redirect_uri", Some("http://app.example/back?x=1"))),
        ("a script", with(good.clone(), "redirect_uri", Some("javascript:alert(1)"))),
        ("two addresses", twice),
        ("a long state", with(good.clone(), "state", Some(&"s".repeat(3000)))),
    ] {
        let page = app.open(&asked).await;
        assert_eq!((page.status, page.location), (400, None), "{name}");
    }
    // The rest is told to the application.
    for (name, asked, error) in [
        (
            "a token is wanted",
            with(good.clone(), "response_type", Some("token")),
            "unsupported_response_type",
        ),
        ("no type", with(good.clone(), "response_type", None), "unsupported_response_type"),
        ("too much", with(good.clone(), "scope", Some("admin:*")), "invalid_scope"),
        ("an unknown scope", with(good.clone(), "scope", Some("agents:fly")), "invalid_scope"),
        (
            "a plain challenge",
            with(good.clone(), "code_challenge_method", Some("plain")),
            "invalid_request",
        ),
        (
            "a challenge without method",
            with(good.clone(), "code_challenge_method", None),
            "invalid_request",
        ),
        (
            "a method without challenge",
            with(good.clone(), "code_challenge", None),
            "invalid_request",
        ),
        ("a short challenge", with(good.clone(), "code_challenge", Some("abc")), "invalid_request"),
        ("a request object", with(good.clone(), "request", Some("eyJ")), "request_not_supported"),
    ] {
        let page = app.open(&asked).await;
        assert_eq!(page.status, 303, "{name}");
        assert_eq!(page.told()["error"], error, "{name}");
        assert_eq!(page.told()["state"], "st&te=1", "{name}");
    }
    let public = app_of(&node, true).await;
    let bare = with(with(public.asked(), "code_challenge", None), "code_challenge_method", None);
    assert_eq!(public.open(&bare).await.told()["error"], "invalid_request");
}

#[tokio::test]
async fn a_code_is_for_one_application_one_address_and_one_verifier() {
    let node = open_node();
    let (app, other) = (app_of(&node, false).await, app_of(&node, false).await);
    let public = app_of(&node, true).await;
    let set = |body: &Value, name: &str, value: Value| {
        let mut body = body.clone();
        body[name] = value;
        body
    };
    let good = app.redeeming(&app.code().await);
    let mut without = good.clone();
    without.as_object_mut().expect("an object").remove("code_verifier");
    let theirs =
        set(&set(&good, "client_id", json!(other.id)), "client_secret", json!(other.secret));
    let publics = set(
        &public.redeeming(good["code"].as_str().expect("a code")),
        "client_secret",
        Value::Null,
    );
    for (name, body, status, code) in [
        (
            "another verifier",
            set(&good, "code_verifier", json!("x".repeat(43))),
            400,
            "INVALID_GRANT",
        ),
        ("no verifier", without, 400, "INVALID_GRANT"),
        (
            "another address",
            set(&good, "redirect_uri", json!("https://app.example/back")),
            400,
            "INVALID_GRANT",
        ),
        ("another application", theirs, 400, "INVALID_GRANT"),
        ("a public application", publics, 400, "INVALID_GRANT"),
        (
            "another code",
            set(&good, "code", json!("ic_code.org_00000000000000000000000000.x")),
            400,
            "INVALID_GRANT",
        ),
        ("no code", set(&good, "code", Value::Null), 400, "INVALID_REQUEST"),
        ("no address", set(&good, "redirect_uri", Value::Null), 400, "INVALID_REQUEST"),
        ("a wrong secret", set(&good, "client_secret", json!("ics_wrong")), 401, "INVALID_CLIENT"),
        ("no secret", set(&good, "client_secret", Value::Null), 401, "INVALID_CLIENT"),
        ("no application", set(&good, "client_id", Value::Null), 401, "INVALID_CLIENT"),
        ("an unknown application", set(&good, "client_id", json!("app_x")), 401, "INVALID_CLIENT"),
        ("a password", set(&good, "grant_type", json!("password")), 400, "UNSUPPORTED_GRANT_TYPE"),
        (
            "a device",
            set(&good, "grant_type", json!("urn:ietf:params:oauth:grant-type:device_code")),
            400,
            "UNSUPPORTED_GRANT_TYPE",
        ),
        ("an unknown field", set(&good, "username", json!("x")), 400, "VALIDATION_ERROR"),
    ] {
        let error = app.token(&body).await;
        assert_eq!((error.status, error.code()), (status, code), "{name}: {:#}", error.body);
    }
    // None of that used the code up.
    app.token(&good).await.data(200);

    // A verifier for a code without a challenge would hide a downgrade.
    let plain = with(with(app.asked(), "code_challenge", None), "code_challenge_method", None);
    let code = app.decided(&plain, "allow").await.told()["code"].clone();
    app.token(&app.redeeming(&code)).await.refused(400, "INVALID_GRANT");

    // A public client proves itself by the verifier alone.
    let tokens = public.token(&public.redeeming(&public.code().await)).await.data(200);
    let refresh = json!({
        "grant_type": "refresh_token", "refresh_token": tokens["refresh_token"],
        "client_id": public.id,
    });
    let stolen =
        set(&set(&refresh, "client_id", json!(app.id)), "client_secret", json!(app.secret));
    app.token(&stolen).await.refused(400, "INVALID_GRANT");
    let person = json!({ "refresh_token": tokens["refresh_token"] });
    app.customer.anonymous("/v1/auth/refresh", &person).await.refused(401, "INVALID_CREDENTIALS");
    public.token(&refresh).await.data(200);
    let itself = json!({ "grant_type": "client_credentials", "client_id": public.id });
    public.token(&itself).await.refused(401, "INVALID_CLIENT");
}

#[tokio::test]
async fn forms_of_other_sites_get_nowhere() {
    let node = open_node();
    let app = app_of(&node, false).await;
    let asked = app.asked();
    let (cookie, consent) = app.logged_in(&asked).await;
    let allow = |form: &Fields| {
        let mut form = form.clone();
        form.extend(fields(&[("decision", "allow")]));
        form
    };
    let form = allow(&consent.hidden);
    let (_, strange) = app.logged_in(&asked).await;
    let ticket = |form: &Fields| {
        form.iter().find(|(name, _)| name == "ticket").map(|(_, value)| value.clone())
    };
    let theirs = ticket(&strange.hidden);
    for (name, cookie, form) in [
        ("no cookie", "", form.clone()),
        ("another cookie", "__Host-roost-form=x", form.clone()),
        ("no proof", cookie.as_str(), with(form.clone(), "csrf", None)),
        ("a wrong proof", cookie.as_str(), with(form.clone(), "csrf", Some("x"))),
        ("a wrong ticket", cookie.as_str(), with(form.clone(), "ticket", Some("usr_x.9.y"))),
        ("another's ticket", cookie.as_str(), with(form.clone(), "ticket", theirs.as_deref())),
        (
            "more scopes",
            cookie.as_str(),
            with(form.clone(), "scope", Some("agents:read agents:invoke")),
        ),
        ("another state", cookie.as_str(), with(form.clone(), "state", Some("other"))),
        (
            "no challenge",
            cookie.as_str(),
            with(with(form.clone(), "code_challenge", None), "code_challenge_method", None),
        ),
        ("no decision", cookie.as_str(), with(form.clone(), "decision", None)),
    ] {
        let page = app.submit(cookie, &form).await;
        assert_eq!((page.status, page.location), (400, None), "{name}");
    }
    assert_eq!(app.submit(&cookie, &form).await.status, 303);
    let wrong = app.open(&asked).await;
    let mut form = wrong.hidden.clone();
    form.extend(fields(&[("email", &app.email), ("password", "wrong-password")]));
    let page = app.submit(&wrong.cookie, &form).await;
    assert_eq!(page.status, 401);
    assert!(page.text.contains("role=\"alert\"") && page.text.contains(&app.email));
    let put = app.customer.request(Method::PUT, "/oauth/authorize");
    assert_eq!(Page::of(put).await.status, 405);
}

#[tokio::test]
async fn who_belongs_to_several_organizations_names_one() {
    let node = open_node();
    let app = app_of(&node, false).await;
    let second = app.customer.organization("second", "pro").await;
    let org = text(&second.get("/v1/auth/me").await.data(200)["org_id"]);
    let asked = json!({ "email": app.email, "role": "viewer" });
    let invitation = second.post("/v1/invitations", &asked).await.data(201);
    let accept = json!({ "token": invitation["token"], "password": "another one" });
    second.anonymous("/v1/invitations/accept", &accept).await.data(201);
    let strangers = App::new(second, &app.email, &node.password, false).await;
    for (app, password, named, shown) in [
        (&app, node.password.as_str(), "", "default"),
        (&app, "another one", &org, "second"),
        (&strangers, "another one", "", "second"),
    ] {
        let page = app.open(&app.asked()).await;
        let mut form = page.hidden.clone();
        form.extend(fields(&[("email", &app.email), ("password", password), ("org_id", named)]));
        let consent = app.submit(&page.cookie, &form).await;
        assert_eq!(consent.status, 200, "{shown}: {}", consent.text);
        assert!(consent.text.contains(&format!(", of {shown}.")), "{}", consent.text);
    }
    let page = app.open(&app.asked()).await;
    let mut form = page.hidden.clone();
    form.extend(fields(&[("email", &app.email), ("password", "x"), ("org_id", "\"><b>")]));
    let again = app.submit(&page.cookie, &form).await;
    assert_eq!(again.status, 400);
    assert!(
        again.text.contains("<details open>") && !again.text.contains("\"><b>"),
        "{}",
        again.text
    );
}

#[tokio::test]
async fn applications_are_registered_with_care() {
    let node = Node::start();
    let customer = node.customer();
    let good = json!({ "name": "x", "redirect_uris": [BACK], "scopes": ["agents:read"] });
    let set = |name: &str, value: Value| {
        let mut body = good.clone();
        body[name] = value;
        body
    };
    for body in [
        set("redirect_uris", json!([])),
        set("redirect_uris", json!(["http://app.example/"])),
        set("redirect_uris", json!(["https://app.example/#x"])),
        set("redirect_uris", json!(["https://*.example/"])).clone(),
        set("redirect_uris", json!(["/back"])),
        set("redirect_uris", json!("https://app.example")),
        set("scopes", json!([])),
        set("scopes", json!(["agents:fly"])),
        set("name", json!("")),
        set("token_lifetime", json!(299)),
        set("token_lifetime", json!(86401)),
        set("public", json!("yes")),
        set("extra", json!(1)),
    ] {
        customer.post("/v1/oauth/applications", &body).await.refused(400, "VALIDATION_ERROR");
    }
    let made = customer.post("/v1/oauth/applications", &good).await.data(201);
    let listed = customer.get("/v1/oauth/applications").await.data(200);
    assert_eq!(listed["items"][0]["client_id"], made["client_id"]);
    assert!(!listed.to_string().contains(&text(&made["client_secret"])), "a secret is shown once");
    let listed = node.tester().get("/v1/oauth/applications").await.data(200);
    assert_eq!(listed["items"], json!([]), "test mode has its own");
}
