//! The engine on this machine: whether it answers, and what it has. It may come and go.

use std::{
    path::PathBuf,
    sync::{
        PoisonError, RwLock,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
    time::Duration,
};

use bollard::{API_DEFAULT_VERSION, Docker};
use domain::deployment::Failure;
use http::{HeaderValue, header::HeaderName};

/// How long the engine may take to say that it is there.
const ANSWERS_WITHIN: Duration = Duration::from_secs(3);
/// How long one request may take, in seconds. Builds and pulls have their own limit.
const REQUEST_SECONDS: u64 = 3600;

/// An engine that answered.
#[derive(Clone)]
pub struct Here {
    /// The way to it.
    pub docker: Docker,
    /// Whether it can give containers graphics processors.
    pub has_gpu: bool,
    /// Whether containers get its list of allowed system calls.
    pub has_seccomp: bool,
}

/// Looks in a row without an answer after which an engine is gone; a busy one may miss some.
const MISSES_MAX: u32 = 3;

/// The engine behind a socket.
pub struct Engine {
    socket: PathBuf,
    state: RwLock<Result<Here, String>>,
    misses: AtomicU32,
}

impl Engine {
    /// Not asked yet.
    pub fn new(socket: PathBuf) -> Self {
        let state = RwLock::new(Err("it was not asked yet".to_owned()));
        Self { socket, state, misses: AtomicU32::new(0) }
    }

    /// Asks whether it answers.
    pub async fn look(&self) {
        let found = match tokio::time::timeout(ANSWERS_WITHIN, self.ask()).await {
            Ok(Ok(here)) => Ok(here),
            Ok(Err(error)) => Err(error.to_string()),
            Err(_) => Err("it does not answer".to_owned()),
        };
        let misses = match &found {
            Ok(_) => 0,
            Err(_) => self.misses.load(Relaxed).saturating_add(1),
        };
        self.misses.store(misses, Relaxed);
        let mut state = self.state.write().unwrap_or_else(PoisonError::into_inner);
        if state.is_err() || misses == 0 || misses >= MISSES_MAX {
            *state = found;
        }
    }

    async fn ask(&self) -> Result<Here, bollard::errors::Error> {
        let path = self.socket.to_string_lossy();
        let docker = Docker::connect_with_unix(&path, REQUEST_SECONDS, API_DEFAULT_VERSION)?
            .with_request_modifier(with_url_safe_credentials)
            .negotiate_version()
            .await?;
        let info = docker.info().await?;
        let runtimes = info.runtimes.unwrap_or_default();
        let security = info.security_options.unwrap_or_default();
        Ok(Here {
            docker,
            has_gpu: runtimes.keys().any(|name| name.contains("nvidia")),
            has_seccomp: security.iter().any(|option| option.contains("seccomp")),
        })
    }

    /// The engine, if it answered when it was last asked.
    pub fn here(&self) -> Result<Here, Failure> {
        let state = self.state.read().unwrap_or_else(PoisonError::into_inner);
        state.clone().map_err(|why| {
            let socket = self.socket.display();
            Failure::new(
                "NO_CAPACITY",
                format!(
                    "no Docker engine answers at {socket} ({why}); start one, or set docker.socket"
                ),
            )
        })
    }
}

/// The engine reads registry logins as base64url (RFC 4648 §5); bollard writes the standard
/// alphabet, and a password whose encoding has `+` or `/` would be dropped silently.
fn with_url_safe_credentials(mut request: bollard::BollardRequest) -> bollard::BollardRequest {
    for name in ["x-registry-auth", "x-registry-config"].map(HeaderName::from_static) {
        let safe = request.headers().get(&name).and_then(|value| {
            let text = value.to_str().ok()?.replace('+', "-").replace('/', "_");
            HeaderValue::from_str(&text).ok()
        });
        if let Some(safe) = safe {
            request.headers_mut().insert(name, safe);
        }
    }
    request
}
