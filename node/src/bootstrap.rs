//! The first start of a cluster: one organization, its owner, two keys and the default clouds.

use argon2::{Argon2, PasswordHasher as _};
use domain::{
    ApiKeyId, CloudId, OrgId, Timestamp, UserId,
    account::{ApiKey, Mode, Organization, Tenant, User},
    cloud::{Cloud, CloudLimits, Provider},
    directory::Bootstrap,
};

use crate::{
    adapters::system::{SystemClock, SystemDice, random_bytes},
    hex,
};
use actors::ports::{Clock as _, Entropy as _};

/// The owner's address until somebody sets another one.
pub const OWNER_EMAIL: &str = "owner@localhost";

/// What is printed once.
#[derive(Clone, Debug)]
pub struct FirstSecrets {
    /// The owner's password.
    pub password: String,
    /// A key to live objects.
    pub live_key: String,
    /// A key to test objects.
    pub test_key: String,
}

/// What the first clouds run agents with.
#[derive(Clone, Copy, Debug)]
pub struct DefaultClouds {
    /// The default cloud's.
    pub default: Provider,
    /// Whether a Docker engine answers.
    pub has_engine: bool,
}

/// The first records and the secrets that belong to them.
pub fn first(
    pepper: &[u8; 32],
    wanted: DefaultClouds,
) -> anyhow::Result<(Bootstrap, FirstSecrets)> {
    let now = SystemClock.now();
    let mut dice = || SystemDice.dice();
    let password =
        std::env::var("ROOST_BOOTSTRAP_PASSWORD").unwrap_or_else(|_| hex(&random_bytes::<12>()));
    let secrets = FirstSecrets {
        password,
        live_key: api::caller::make_key(Mode::Live, &mut dice),
        test_key: api::caller::make_key(Mode::Test, &mut dice),
    };
    let org = OrgId::new(now, dice());
    let hash = Argon2::default().hash_password(secrets.password.as_bytes());
    let password_hash =
        hash.map_err(|error| anyhow::anyhow!("the password can't be hashed: {error}"))?;
    let owner = User {
        id: UserId::new(now, dice()),
        org,
        email: OWNER_EMAIL.to_owned(),
        password_hash: password_hash.to_string(),
        role: "owner".to_owned(),
        created_at: now,
    };
    let key = |mode, name: &str, secret: &str| ApiKey {
        id: ApiKeyId::new(now, dice()),
        tenant: Tenant { org, mode },
        name: name.to_owned(),
        hash: api::caller::hash_key(pepper, secret),
        last4: secret[secret.len() - 4..].to_owned(),
        scopes: vec!["admin:*".to_owned()],
        created_at: now,
    };
    let keys = vec![
        key(Mode::Live, "first live key", &secrets.live_key),
        key(Mode::Test, "first test key", &secrets.test_key),
    ];
    let live = Tenant { org, mode: Mode::Live };
    let mut clouds = vec![
        default_cloud(live, wanted.default, now),
        default_cloud(Tenant { org, mode: Mode::Test }, Provider::Sandbox, now),
    ];
    if wanted.has_engine && wanted.default != Provider::Docker {
        // A little older, so that lists show the default cloud first.
        let before = Timestamp::from_millis(now.millis().saturating_sub(1));
        clouds.push(Cloud {
            name: "docker".to_owned(),
            display_name: "Docker".to_owned(),
            is_default: false,
            ..default_cloud(live, Provider::Docker, before)
        });
    }
    let organization = Organization { id: org, name: "default".to_owned(), created_at: now };
    Ok((Bootstrap { organization, owner, keys, clouds }, secrets))
}

fn default_cloud(tenant: Tenant, provider: Provider, now: Timestamp) -> Cloud {
    Cloud {
        id: CloudId::new(now, SystemDice.dice()),
        tenant,
        name: "default".to_owned(),
        display_name: "Default".to_owned(),
        region: "local".to_owned(),
        provider,
        is_default: true,
        limits: CloudLimits::default(),
        node_selector: Default::default(),
        metadata: Default::default(),
        created_at: now,
        updated_at: now,
        revision: 1,
    }
}
