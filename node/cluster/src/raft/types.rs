//! The one type configuration of all groups. Commands travel as bytes, so that store and network need not
//! know which machine they serve; answers stay in the process.

use std::{any::Any, fmt};

use bytes::Bytes;
use domain::machine::Answer;
use openraft::BasicNode;
use serde::{Deserialize, Serialize};

use super::step::InStep;

/// An encoded [`domain::machine::Entry`].
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Proposal(pub Bytes);

impl fmt::Debug for Proposal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Proposal({} bytes)", self.0.len())
    }
}

impl fmt::Display for Proposal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// What the machine answered, for whoever waits for it in this process; nothing for entries that carry no
/// command.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Answered {
    #[serde(skip)]
    answer: Option<Box<dyn Any + Send + Sync>>,
}

impl Answered {
    /// This answer.
    pub fn with<R: Send + Sync + 'static>(answer: Answer<R>) -> Self {
        Self { answer: Some(Box::new(answer)) }
    }

    /// The answer to a command whose replies are of this kind.
    pub fn take<R: 'static>(self) -> Option<Answer<R>> {
        self.answer?.downcast().ok().map(|answer| *answer)
    }
}

/// Runs the groups' tasks: tokio in step, with dice that fall as [`super::group::Shared::seed`] says.
pub type Runtime = openraft::rt::deterministic_rng::DeterministicRng<InStep>;

openraft::declare_raft_types!(
    /// All groups of all nodes.
    pub TypeConfig:
        D = Proposal,
        R = Answered,
        NodeId = u64,
        Node = BasicNode,
        // One leader per term, so that a term alone can serve as a fence.
        LeaderId = openraft::impls::leader_id_std::LeaderId<u64, u64>,
        AsyncRuntime = Runtime,
);

/// A line of a group's log.
pub type Entry = openraft::alias::EntryOf<TypeConfig>;
/// Term and index.
pub type LogId = openraft::alias::LogIdOf<TypeConfig>;
/// Who was voted for.
pub type Vote = openraft::alias::VoteOf<TypeConfig>;
/// Voters and learners, and since when.
pub type Membership = openraft::alias::StoredMembershipOf<TypeConfig>;
/// What a snapshot holds.
pub type SnapshotMeta = openraft::alias::SnapshotMetaOf<TypeConfig>;
