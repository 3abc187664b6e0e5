//! Bugs that are planted on purpose. A test that can't fail proves nothing: `.ci/planted` builds with the
//! feature of this name, turns one bug on after the other and sees the tests find it. In every other build
//! there is none, and the compiler knows that.

/// A bug that the tests must find.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bug {
    /// A commit of the log is answered before its sync.
    AcknowledgeBeforeSync,
    /// A vote is not synced.
    VoteUnsynced,
    /// A truncation of the log is forgotten.
    TruncationForgotten,
    /// A deposed owner may still change the directory.
    NoFencing,
    /// A read does not ask the leader how far it has to be.
    StaleRead,
    /// The last event of every stretch is told to nobody.
    EventLost,
    /// A new owner begins a job's attempt again instead of asking for it.
    DoubleTakeOver,
    /// The answer of a keyed call is not kept.
    ReplyForgotten,
    /// A leader that leaves its group does not hand over first.
    LeaderLeavesFirst,
    /// A snapshot lacks one table.
    SnapshotIncomplete,
    /// A leader that restarts leads on in the same term.
    LeaderRestored,
    /// A change of voters that its leader did not end is left half-way.
    ChangeHalfWay,
}

/// Whether this bug is there.
#[cfg(feature = "planted")]
pub fn has(bug: Bug) -> bool {
    static PLANTED: std::sync::OnceLock<String> = std::sync::OnceLock::new();
    let planted = PLANTED.get_or_init(|| std::env::var("ROOST_PLANTED").unwrap_or_default());
    *planted == format!("{bug:?}")
}

/// Whether this bug is there: never.
#[cfg(not(feature = "planted"))]
pub const fn has(_: Bug) -> bool {
    false
}
