//! The pages that people see: plain HTML, one style, no script, nothing from elsewhere.
//!
//! They are forms that work with a keyboard and a screen reader, at any width, light and dark; a
//! content security policy forbids everything they do not need.

use base64::{Engine as _, engine::general_purpose::STANDARD};
use http::{StatusCode, header};
use poem::Response;
use sha2::{Digest as _, Sha256};

/// The login form.
pub(crate) struct Login<'p> {
    /// Who asks.
    pub(crate) application: &'p str,
    /// The host that people are sent back to.
    pub(crate) home: &'p str,
    /// The address that was typed before.
    pub(crate) email: &'p str,
    /// The organization that was typed before.
    pub(crate) organization: &'p str,
    /// What went wrong before.
    pub(crate) why: Option<&'p str>,
    /// What the form carries on.
    pub(crate) hidden: Vec<(String, String)>,
}

/// The consent form.
pub(crate) struct Consent<'p> {
    /// Who asks.
    pub(crate) application: &'p str,
    /// The host that people are sent back to.
    pub(crate) home: &'p str,
    /// Who is asked.
    pub(crate) email: &'p str,
    /// For which organization.
    pub(crate) organization: &'p str,
    /// What for.
    pub(crate) scopes: Vec<String>,
    /// What the form carries on.
    pub(crate) hidden: Vec<(String, String)>,
}

const STYLE: &str = "
:root{color-scheme:light dark;--ink:#1a1c1e;--soft:#5b6168;--page:#f3f4f6;--card:#fff;--line:#d4d8dd;
--deed:#1f5fbf;--deed-ink:#fff;--bad:#a31621;--bad-page:#fdeeee}
@media (prefers-color-scheme:dark){:root{--ink:#eceef0;--soft:#a4abb3;--page:#111417;--card:#1b1f24;
--line:#3a4149;--deed:#7fb0ff;--deed-ink:#0c1a2e;--bad:#ff9a9a;--bad-page:#3a1a1c}}
*{box-sizing:border-box}
body{margin:0;min-height:100vh;display:grid;place-items:center;padding:1.5rem 1rem;background:var(--page);
color:var(--ink);font:1rem/1.5 system-ui,-apple-system,'Segoe UI',Roboto,sans-serif}
main{width:100%;max-width:26rem;background:var(--card);border:1px solid var(--line);border-radius:.75rem;
padding:2rem 1.75rem}
.mark{font-weight:700;letter-spacing:.02em;color:var(--soft);margin:0 0 1.25rem}
h1{font-size:1.375rem;line-height:1.3;margin:0 0 .5rem;overflow-wrap:anywhere}
p{margin:0 0 1rem;overflow-wrap:anywhere}
.soft{color:var(--soft);font-size:.9375rem}
label{display:block;font-weight:600;margin:0 0 .25rem}
input{width:100%;font:inherit;color:inherit;background:transparent;border:1px solid var(--soft);
border-radius:.5rem;padding:.625rem .75rem;margin:0 0 1rem}
details{margin:0 0 1rem}
summary{cursor:pointer;color:var(--soft);font-size:.9375rem}
details[open] summary{margin:0 0 .75rem}
button{font:inherit;font-weight:600;width:100%;min-height:2.75rem;border-radius:.5rem;cursor:pointer;
border:1px solid var(--deed);background:var(--deed);color:var(--deed-ink);padding:.5rem 1rem}
button.quiet{background:transparent;color:var(--ink);border-color:var(--soft)}
.both{display:grid;gap:.75rem;margin-top:1.25rem}
@media (min-width:26rem){.both{grid-template-columns:1fr 1fr}}
:focus-visible{outline:3px solid var(--deed);outline-offset:2px}
.bad{color:var(--bad);background:var(--bad-page);border-radius:.5rem;padding:.625rem .75rem;font-weight:600}
ul{list-style:none;margin:0 0 1rem;padding:0;border-top:1px solid var(--line)}
li{padding:.625rem 0;border-bottom:1px solid var(--line)}
code{display:block;color:var(--soft);font-size:.8125rem}
";

/// A scope in words for people.
pub(crate) fn in_words(scope: &str) -> &'static str {
    match scope {
        "clouds:read" => "See your clouds",
        "clouds:write" => "Create, change and delete clouds",
        "clouds:*" => "See, create, change and delete clouds",
        "agents:read" => "See your agents, their logs and metrics",
        "agents:write" => "Deploy, change and delete agents",
        "agents:invoke" => "Call your agents",
        "agents:*" => "See, deploy, change, delete and call agents",
        "chains:*" | "chains:write" => "See, change and run chains",
        "chains:read" => "See your chains",
        "chains:invoke" => "Run your chains",
        "billing:read" => "See invoices and usage",
        "webhooks:read" => "See your webhooks and events",
        "webhooks:write" | "webhooks:*" => "See and change webhooks",
        "secrets:write" => "Set secrets (their values can't be read)",
        "schedules:write" => "See and change schedules",
        "cluster:read" => "See the state of the cluster",
        _ => "Everything: full access to the account",
    }
}

/// Text as it may stand in HTML, in an attribute too.
fn escaped(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            '\'' => safe.push_str("&#39;"),
            c => safe.push(c),
        }
    }
    safe
}

fn hidden_fields(fields: &[(String, String)]) -> String {
    let field = |(name, value): &(String, String)| {
        format!("<input type=\"hidden\" name=\"{}\" value=\"{}\">", escaped(name), escaped(value))
    };
    fields.iter().map(field).collect()
}

/// A whole page. `goes_to` is where its form's answer may lead.
fn page(status: StatusCode, title: &str, inside: &str, goes_to: &str) -> Response {
    let style_hash = STANDARD.encode(Sha256::digest(STYLE));
    let policy = format!(
        "default-src 'none'; style-src 'sha256-{style_hash}'; form-action 'self' {goes_to}; \
         frame-ancestors 'none'; base-uri 'none'"
    );
    let body = format!(
        "<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\
         <meta name=\"robots\" content=\"noindex\"><title>{}</title><style>{STYLE}</style></head>\
         <body><main><p class=\"mark\">Roost</p>{inside}</main></body></html>",
        escaped(title)
    );
    Response::builder()
        .status(status)
        .header("content-security-policy", policy.trim_end())
        .header("x-frame-options", "DENY")
        .header("x-content-type-options", "nosniff")
        .header(header::REFERRER_POLICY, "no-referrer")
        .header(header::CACHE_CONTROL, "no-store")
        .content_type("text/html; charset=utf-8")
        .body(body)
}

/// Asks who it is.
pub(crate) fn login(page_of: &Login<'_>, status: StatusCode, goes_to: &str) -> Response {
    let Login { application, home, email, organization, why, hidden } = page_of;
    let open = if organization.is_empty() { "" } else { " open" };
    let why = why.map_or_else(String::new, |why| {
        format!("<p class=\"bad\" id=\"why\" role=\"alert\">{}</p>", escaped(why))
    });
    let described = if why.is_empty() { "" } else { " aria-describedby=\"why\"" };
    let inside = format!(
        "<h1>Log in</h1><p class=\"soft\">to continue to <strong>{}</strong> ({})</p>{why}\
         <form method=\"post\" action=\"/oauth/authorize\">{}\
         <label for=\"email\">Email</label>\
         <input id=\"email\" name=\"email\" type=\"email\" autocomplete=\"username\" required \
         autofocus value=\"{}\"{described}>\
         <label for=\"password\">Password</label>\
         <input id=\"password\" name=\"password\" type=\"password\" \
         autocomplete=\"current-password\" required{described}>\
         <details{open}><summary>My email belongs to several organizations</summary>\
         <label for=\"org_id\">Organization</label>\
         <input id=\"org_id\" name=\"org_id\" placeholder=\"org_…\" autocomplete=\"off\" \
         maxlength=\"64\" value=\"{}\"></details>\
         <button type=\"submit\">Log in</button></form>",
        escaped(application),
        escaped(home),
        hidden_fields(hidden),
        escaped(email),
        escaped(organization),
    );
    page(status, &format!("Log in to continue to {application}"), &inside, goes_to)
}

/// Asks whether the application may come in.
pub(crate) fn consent(page_of: &Consent<'_>, goes_to: &str) -> Response {
    let Consent { application, home, email, organization, scopes, hidden } = page_of;
    let scopes: String = scopes
        .iter()
        .map(|scope| format!("<li>{}<code>{}</code></li>", in_words(scope), escaped(scope)))
        .collect();
    let inside = format!(
        "<h1>Allow {0} to use your account?</h1>\
         <p class=\"soft\">You are {1}, of {2}. {0} will be able to:</p><ul>{scopes}</ul>\
         <p class=\"soft\">You will be sent to {3}. Allow this only if you trust it.</p>\
         <form method=\"post\" action=\"/oauth/authorize\">{4}<div class=\"both\">\
         <button type=\"submit\" name=\"decision\" value=\"allow\">Allow</button>\
         <button class=\"quiet\" type=\"submit\" name=\"decision\" value=\"deny\">Deny</button>\
         </div></form>",
        escaped(application),
        escaped(email),
        escaped(organization),
        escaped(home),
        hidden_fields(hidden),
    );
    page(StatusCode::OK, &format!("Allow {application} to use your account?"), &inside, goes_to)
}

/// Tells the person what is wrong, where nobody else may be told.
pub(crate) fn wrong(status: StatusCode, why: &str) -> Response {
    let inside = format!(
        "<h1>This does not work</h1><p class=\"bad\" role=\"alert\">{}</p>\
         <p class=\"soft\">Nothing was sent anywhere. Go back to the application and try again; if \
         it stays, tell its makers.</p>",
        escaped(why)
    );
    page(status, "This does not work", &inside, "")
}

/// Sends the browser on, with GET.
pub(crate) fn redirect(to: &str) -> Response {
    Response::builder()
        .status(StatusCode::SEE_OTHER)
        .header(header::LOCATION, to)
        .header(header::CACHE_CONTROL, "no-store")
        .header(header::REFERRER_POLICY, "no-referrer")
        .finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_that_was_typed_becomes_markup() {
        assert_eq!(escaped("<a b=\"c\">'&"), "&lt;a b=&quot;c&quot;&gt;&#39;&amp;");
    }

    #[test]
    fn every_scope_has_words() {
        for scope in domain::account::GRANTABLE {
            let is_everything = in_words(scope).starts_with("Everything");
            assert_eq!(is_everything, scope == "admin:*", "{scope}");
        }
    }
}
