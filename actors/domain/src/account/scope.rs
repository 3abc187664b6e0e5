//! Scopes: what credentials may do, and who may hand which of them on.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

/// What an operation may ask for (`interface`, Permission scopes).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Scope {
    /// List and view clouds.
    CloudsRead,
    /// Create, update, delete clouds.
    CloudsWrite,
    /// List and view agents.
    AgentsRead,
    /// Deploy, update, delete agents.
    AgentsWrite,
    /// Call agent endpoints.
    AgentsInvoke,
    /// View webhooks, deliveries and events.
    WebhooksRead,
    /// Create, update, delete webhooks.
    WebhooksWrite,
    /// Set and remove secrets.
    SecretsWrite,
    /// View the cluster.
    ClusterRead,
    /// Full account access.
    Admin,
}

/// Every scope that may be granted, in the order they are shown.
pub const GRANTABLE: [&str; 19] = [
    "clouds:read",
    "clouds:write",
    "clouds:*",
    "agents:read",
    "agents:write",
    "agents:invoke",
    "agents:*",
    "chains:*",
    "chains:read",
    "chains:write",
    "chains:invoke",
    "billing:read",
    "webhooks:read",
    "webhooks:write",
    "webhooks:*",
    "secrets:write",
    "schedules:write",
    "cluster:read",
    "admin:*",
];

impl Scope {
    /// The word for it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::CloudsRead => "clouds:read",
            Self::CloudsWrite => "clouds:write",
            Self::AgentsRead => "agents:read",
            Self::AgentsWrite => "agents:write",
            Self::AgentsInvoke => "agents:invoke",
            Self::WebhooksRead => "webhooks:read",
            Self::WebhooksWrite => "webhooks:write",
            Self::SecretsWrite => "secrets:write",
            Self::ClusterRead => "cluster:read",
            Self::Admin => "admin:*",
        }
    }
}

/// A text that names no scope.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a scope; choose among {list}", list = GRANTABLE.join(", "))]
pub struct NotAScope(pub String);

/// What somebody may do: words of [`GRANTABLE`], each once, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Scopes(BTreeSet<String>);

impl Scopes {
    /// Full account access.
    pub fn all() -> Self {
        Self::known(["admin:*"])
    }

    fn known<const N: usize>(words: [&str; N]) -> Self {
        Self(words.into_iter().map(str::to_owned).collect())
    }

    /// From words of a client.
    pub fn parse<'w>(words: impl IntoIterator<Item = &'w str>) -> Result<Self, NotAScope> {
        let known = |word: &str| match GRANTABLE.contains(&word) {
            true => Ok(word.to_owned()),
            false => Err(NotAScope(word.chars().take(64).collect())),
        };
        Ok(Self(words.into_iter().map(known).collect::<Result<_, _>>()?))
    }

    /// Whether this covers one word: itself, `noun:*` for its noun, or `admin:*` for everything.
    pub fn covers(&self, wanted: &str) -> bool {
        let (noun, _) = wanted.split_once(':').unwrap_or((wanted, ""));
        self.0
            .iter()
            .any(|has| has == "admin:*" || has == wanted || has.strip_suffix(":*") == Some(noun))
    }

    /// Whether this allows an operation.
    pub fn allows(&self, scope: Scope) -> bool {
        self.covers(scope.as_str())
    }

    /// The first word of `wanted` that is not covered: nobody hands on what they lack.
    pub fn lacks<'w>(&self, wanted: &'w Self) -> Option<&'w str> {
        wanted.0.iter().map(String::as_str).find(|word| !self.covers(word))
    }

    /// What both allow.
    pub fn both(&self, other: &Self) -> Self {
        let of = |one: &Self, two: &Self| {
            one.0.iter().filter(|word| two.covers(word)).cloned().collect::<BTreeSet<_>>()
        };
        Self(of(self, other).union(&of(other, self)).cloned().collect())
    }

    /// The words, in order.
    pub fn words(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(String::as_str)
    }

    /// The words as a list.
    pub fn to_vec(&self) -> Vec<String> {
        self.0.iter().cloned().collect()
    }

    /// Whether it allows nothing.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// The role of a person: a named set of scopes (`decisions` §13).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Everything, other owners included.
    Owner,
    /// Everything but other owners.
    Admin,
    /// Builds and runs agents.
    Developer,
    /// Calls agents.
    Invoker,
    /// Sees invoices and usage.
    Billing,
    /// Looks on.
    Viewer,
}

impl Role {
    /// Every role, from most to least.
    pub const ALL: [Self; 6] =
        [Self::Owner, Self::Admin, Self::Developer, Self::Invoker, Self::Billing, Self::Viewer];

    /// The word used in bodies.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Owner => "owner",
            Self::Admin => "admin",
            Self::Developer => "developer",
            Self::Invoker => "invoker",
            Self::Billing => "billing",
            Self::Viewer => "viewer",
        }
    }

    /// What people of this role may do.
    pub fn scopes(self) -> Scopes {
        match self {
            Self::Owner | Self::Admin => Scopes::all(),
            Self::Developer => Scopes::known([
                "agents:*",
                "chains:*",
                "clouds:read",
                "schedules:write",
                "secrets:write",
                "webhooks:*",
            ]),
            Self::Invoker => Scopes::known(["agents:invoke", "agents:read"]),
            Self::Billing => Scopes::known(["billing:read"]),
            Self::Viewer => Scopes::known([
                "agents:read",
                "billing:read",
                "chains:read",
                "clouds:read",
                "webhooks:read",
            ]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scopes(words: &[&str]) -> Scopes {
        Scopes::parse(words.iter().copied()).expect("scopes")
    }

    #[test]
    fn a_star_covers_its_noun_and_admin_everything() {
        for (granted, wanted, covered) in [
            ("agents:read", "agents:read", true),
            ("agents:*", "agents:invoke", true),
            ("agents:*", "agents:*", true),
            ("agents:read", "agents:*", false),
            ("agents:read", "agents:write", false),
            ("clouds:*", "agents:read", false),
            ("admin:*", "cluster:read", true),
        ] {
            assert_eq!(scopes(&[granted]).covers(wanted), covered, "{granted} {wanted}");
        }
        assert_eq!(Scopes::parse(["agents:fly"]), Err(NotAScope("agents:fly".to_owned())));
    }

    #[test]
    fn nobody_hands_on_what_they_lack() {
        let developer = Role::Developer.scopes();
        assert_eq!(developer.lacks(&scopes(&["agents:invoke", "clouds:read"])), None);
        assert_eq!(developer.lacks(&scopes(&["clouds:write"])), Some("clouds:write"));
        assert_eq!(developer.lacks(&Scopes::all()), Some("admin:*"));
    }

    #[test]
    fn both_is_what_either_side_allows_of_the_other() {
        let both = scopes(&["agents:*", "clouds:read"]).both(&scopes(&["agents:read", "admin:*"]));
        assert_eq!(both, scopes(&["agents:*", "agents:read", "clouds:read"]));
        assert!(Role::Billing.scopes().both(&Role::Invoker.scopes()).is_empty());
    }
}
