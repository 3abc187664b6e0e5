//! Scopes: what credentials may do, and who may hand which of them on.

use std::{fmt, sync::LazyLock};

use serde::{Deserialize, Deserializer, Serialize, Serializer};

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

/// What somebody may do: words of [`GRANTABLE`], each once, in order. A bit for each: there are as many of
/// these as there are keys.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct Scopes(u32);

/// The words as they are ordered in lists; a word's place is its bit.
static WORDS: LazyLock<[&str; GRANTABLE.len()]> = LazyLock::new(|| {
    let mut words = GRANTABLE;
    words.sort_unstable();
    words
});

fn bit(word: &str) -> Option<u32> {
    WORDS.binary_search(&word).ok().map(|place| 1 << place)
}

impl Scopes {
    /// Full account access.
    pub fn all() -> Self {
        Self::known(["admin:*"])
    }

    /// Words that are none allow nothing.
    fn known<'w>(words: impl IntoIterator<Item = &'w str>) -> Self {
        Self(words.into_iter().filter_map(bit).fold(0, |bits, one| bits | one))
    }

    /// From words of a client.
    pub fn parse<'w>(words: impl IntoIterator<Item = &'w str>) -> Result<Self, NotAScope> {
        let known = |word: &str| bit(word).ok_or(NotAScope(word.chars().take(64).collect()));
        words.into_iter().map(known).try_fold(0, |bits, one| one.map(|one| bits | one)).map(Self)
    }

    /// Whether this covers one word: itself, `noun:*` for its noun, or `admin:*` for everything.
    pub fn covers(&self, wanted: &str) -> bool {
        let (noun, _) = wanted.split_once(':').unwrap_or((wanted, ""));
        self.words()
            .any(|has| has == "admin:*" || has == wanted || has.strip_suffix(":*") == Some(noun))
    }

    /// Whether this allows an operation.
    pub fn allows(&self, scope: Scope) -> bool {
        self.covers(scope.as_str())
    }

    /// The first word of `wanted` that is not covered: nobody hands on what they lack.
    pub fn lacks(&self, wanted: &Self) -> Option<&'static str> {
        wanted.words().find(|word| !self.covers(word))
    }

    /// What both allow.
    #[must_use]
    pub fn both(&self, other: &Self) -> Self {
        let of = |one: &Self, two: &Self| Self::known(one.words().filter(|word| two.covers(word)));
        Self(of(self, other).0 | of(other, self).0)
    }

    /// The words, in order.
    pub fn words(self) -> impl Iterator<Item = &'static str> {
        (0..WORDS.len()).filter(move |place| self.0 & (1 << place) != 0).map(|place| WORDS[place])
    }

    /// The words as a list.
    pub fn to_vec(&self) -> Vec<String> {
        self.words().map(str::to_owned).collect()
    }

    /// Whether it allows nothing.
    pub fn is_empty(&self) -> bool {
        self.0 == 0
    }
}

impl fmt::Debug for Scopes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.words()).finish()
    }
}

impl Serialize for Scopes {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.words().collect::<Vec<_>>())
    }
}

impl<'de> Deserialize<'de> for Scopes {
    /// Words of a later release allow nothing in this one.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let words = Vec::<String>::deserialize(deserializer)?;
        Ok(Self::known(words.iter().map(String::as_str)))
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
