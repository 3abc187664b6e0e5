//! Where an agent's code comes from.

use serde::{Deserialize, Serialize};

use crate::UploadId;

/// A registry login. The password is sealed before it is proposed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Credentials {
    /// In plain.
    pub username: String,
    /// Sealed by the node's key.
    #[serde(with = "serde_bytes")]
    pub password: Vec<u8>,
    /// Whether the password is a text with references to secrets.
    #[serde(default)]
    pub is_template: bool,
}

/// One of the specification's three shapes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    /// A branch of a repository.
    Github {
        /// `owner/repository`.
        repo: String,
        /// The repository's default, if not given.
        branch: Option<String>,
        /// A subdirectory, if given.
        path: Option<String>,
    },
    /// A ready image.
    Docker {
        /// Reference with tag.
        image: String,
        /// For a private registry.
        credentials: Option<Credentials>,
    },
    /// An archive that the client uploaded.
    Upload {
        /// Which one.
        upload_id: UploadId,
        /// Its content: blobs are named by it.
        sha256: String,
    },
}

impl Source {
    /// The word used in bodies.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Github { .. } => "github",
            Self::Docker { .. } => "docker",
            Self::Upload { .. } => "upload",
        }
    }
}
