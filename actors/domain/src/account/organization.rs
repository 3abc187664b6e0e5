//! An organization: the account that owns everything, with its tier.

use serde::{Deserialize, Serialize};

use crate::{
    OrgId, Rejection, Timestamp, account::User, cloud::Cloud, directory::Directory,
    event::DirectoryEvent,
};

/// How much an organization may ask of the service (`interface`, Limits).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Tier {
    /// The smallest.
    Starter,
    /// The middle.
    Pro,
    /// The greatest.
    #[default]
    Enterprise,
}

impl Tier {
    /// The word used in bodies and settings.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Starter => "starter",
            Self::Pro => "pro",
            Self::Enterprise => "enterprise",
        }
    }

    /// Most agents of an organization, per mode; `None` is no limit.
    pub fn agents_max(self) -> Option<usize> {
        match self {
            Self::Starter => Some(5),
            Self::Pro => Some(50),
            Self::Enterprise => None,
        }
    }

    /// Most webhooks of an organization, per mode.
    pub fn webhooks_max(self) -> usize {
        match self {
            Self::Starter => 5,
            Self::Pro => 20,
            Self::Enterprise => 50,
        }
    }
}

/// An account.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Organization {
    /// Its id, which events call `account_id`.
    pub id: OrgId,
    /// Shown to people.
    pub name: String,
    /// When it was made.
    pub created_at: Timestamp,
    /// How much it may ask for.
    #[serde(default)]
    pub tier: Tier,
    /// When it was last changed.
    #[serde(default)]
    pub updated_at: Timestamp,
    /// Counts changes.
    #[serde(default)]
    pub revision: u64,
}

/// A change of an organization; `None` leaves a field as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OrganizationPatch {
    /// New name.
    pub name: Option<String>,
    /// New tier.
    pub tier: Option<Tier>,
}

impl Directory {
    /// An organization.
    pub fn organization(&self, id: OrgId) -> Result<std::sync::Arc<Organization>, Rejection> {
        self.organizations.get(&id).ok_or(Rejection::OrganizationNotFound(id))
    }

    /// The organization that looks after the cluster: the first one.
    pub fn operator(&self) -> Option<OrgId> {
        self.organizations.rows().next().map(|(id, _)| *id)
    }

    /// An organization's tier.
    pub fn tier(&self, id: OrgId) -> Tier {
        self.organizations.get(&id).map_or(Tier::default(), |row| row.tier)
    }
}

pub(crate) fn create(
    state: &Directory,
    organization: &Organization,
    owner: &User,
    clouds: &[Cloud],
) -> Result<Vec<DirectoryEvent>, Rejection> {
    let taken = |(_, other): (_, &std::sync::Arc<Organization>)| {
        other.name.eq_ignore_ascii_case(&organization.name)
    };
    if state.organizations.rows().any(taken) {
        return Err(Rejection::OrganizationNameTaken(organization.name.clone()));
    }
    if state.user_by_email(&owner.email).is_some() {
        return Err(Rejection::EmailTaken);
    }
    let mut events = vec![
        DirectoryEvent::OrganizationPut(Box::new(organization.clone())),
        DirectoryEvent::UserPut(Box::new(owner.clone())),
    ];
    events.extend(clouds.iter().map(|cloud| DirectoryEvent::CloudPut(Box::new(cloud.clone()))));
    Ok(events)
}

pub(crate) fn update(
    state: &Directory,
    id: OrgId,
    patch: &OrganizationPatch,
    if_match: Option<u64>,
    at: Timestamp,
) -> Result<Vec<DirectoryEvent>, Rejection> {
    let mut row = Organization::clone(&*state.organization(id)?);
    if if_match.is_some_and(|wanted| wanted != row.revision) {
        return Err(Rejection::StaleObject);
    }
    if let Some(name) = &patch.name {
        row.name.clone_from(name);
    }
    row.tier = patch.tier.unwrap_or(row.tier);
    row.updated_at = at;
    row.revision += 1;
    Ok(vec![DirectoryEvent::OrganizationPut(Box::new(row))])
}
