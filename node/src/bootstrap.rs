//! The first start of a cluster: one organization, its owner, two keys and the default clouds.

use domain::{
    ApiKeyId, CloudId, OrgId, Timestamp, UserId,
    account::{ApiKey, Mode, Organization, Role, Scopes, SigningKey, Tenant, Tier, User},
    cloud::{Cloud, CloudLimits, Provider},
    directory::Bootstrap,
};

use crate::{
    adapters::system::{SystemClock, SystemDice, random_bytes},
    hex,
};
use actors::{
    ports::{Clock as _, Entropy as _},
    seal::Sealer,
};
use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};

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
    tier: Tier,
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
    let password_hash = api::hasher::hash(&secrets.password)
        .map_err(|error| anyhow::anyhow!("the password can't be hashed: {error}"))?;
    let owner = User {
        id: UserId::new(now, dice()),
        org,
        email: OWNER_EMAIL.to_owned(),
        password_hash,
        role: Role::Owner,
        created_at: now,
        name: None,
        updated_at: now,
        revision: 1,
        sessions_since: now,
    };
    let key = |mode, name: &str, secret: &str| ApiKey {
        id: ApiKeyId::new(now, dice()),
        tenant: Tenant { org, mode },
        name: name.into(),
        hash: api::caller::hash_key(pepper, secret),
        last4: secret[secret.len() - 4..].into(),
        scopes: Scopes::all(),
        created_at: now,
        allowed_ips: Box::default(),
        expires_at: None,
        agent_ids: Box::default(),
        created_by: None,
        previous: None,
        last_used: None,
        updated_at: now,
        revision: 1,
        rate_limit: None,
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
    let organization = Organization {
        id: org,
        name: "default".to_owned(),
        created_at: now,
        tier,
        updated_at: now,
        revision: 1,
    };
    Ok((Bootstrap { organization, owner, keys, clouds }, secrets))
}

/// A pair of keys for access tokens, its private half sealed.
pub fn signing_key(sealer: &Sealer) -> anyhow::Result<SigningKey> {
    let pair = rcgen::KeyPair::generate_for(&rcgen::PKCS_ED25519)?;
    let id = hex(&random_bytes::<8>());
    let private = URL_SAFE_NO_PAD.encode(pair.serialize_der());
    Ok(SigningKey {
        public: pair.public_key_raw().to_vec(),
        sealed: sealer.seal(&private, &api::tokens::signing_place(&id), &SystemDice),
        id,
        created_at: SystemClock.now(),
    })
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
