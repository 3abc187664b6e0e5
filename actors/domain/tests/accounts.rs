//! Stories of sessions, codes, people, keys and deliveries, command by command.

mod golden;

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use domain::{
    AgentId, ApiKeyId, ApplicationId, AuditId, DeliveryId, EventId, NodeId, OrgId, Rejection,
    RequestId, SessionId, Timestamp, UserId, WebhookId,
    account::{
        ApiKey, Application, Code, Invitation, Mode, Organization, Redemption, Role, Scopes,
        Session, Tenant, Tier, User, UserPatch,
    },
    audit::{Actor, Audited},
    data_key::DataKey,
    directory::{Bootstrap, Command as C, Directory},
    idempotency::Keyed,
    machine::{Entry, Machine, apply},
    node::{JoinToken, NodeFacts, NodeStatus},
    outbox::{Kind, Occurrence},
    secret::Secret,
    shard::{Command as S, Reply, Shard},
    webhook::{
        Ordering, Webhook,
        delivery::{Attempt, Cause, Delivery, Status, Tried, id_of},
    },
};

use crate::golden::{hold, read};

const TENANT: Tenant = Tenant { org: OrgId(1), mode: Mode::Live };
const SESSION: SessionId = SessionId(9);
const HOOK: WebhookId = WebhookId(4);

fn at(seconds: u64) -> Timestamp {
    Timestamp::from_millis(1_700_000_000_000 + seconds * 1000)
}

fn entry<T>(command: T, seconds: u64) -> Entry<T> {
    Entry::new(at(seconds), command)
}

fn play<M: Machine>(
    machine: &mut M,
    command: M::Command,
    seconds: u64,
) -> Result<M::Reply, Rejection> {
    apply(machine, &entry(command, seconds)).0.result
}

fn facts(number: u64) -> Box<NodeFacts> {
    Box::new(NodeFacts {
        id: NodeId(number.into()),
        raft_id: number,
        peer_address: String::new(),
        base_url: String::new(),
        version: String::new(),
        labels: BTreeMap::new(),
        cores: 1,
        memory_mb: 1,
        providers: vec![],
    })
}

#[test]
fn a_node_that_drains_goes_on_draining_when_it_is_back_from_the_dead() {
    let (mut state, id, hash) = (Directory::default(), NodeId(1), [7; 32]);
    play(&mut state, C::RegisterNode(facts(1)), 0).expect("the first");
    let token = JoinToken { hash, expires_at: at(9) };
    play(&mut state, C::MintJoinToken(Box::new(token)), 0).expect("made");
    play(&mut state, C::RedeemJoinToken { hash, facts: facts(2) }, 1).expect("joined");
    let is = |state: &Directory| {
        let node = state.nodes.get(&id).expect("known");
        (node.status, node.since, node.drains_by)
    };
    let to = |to| C::SetNodeStatus { id, to };
    play(&mut state, C::DrainNode { id, by: at(60) }, 2).expect("it drains");
    play(&mut state, C::DrainNode { id, by: at(30) }, 3).expect("sooner");
    assert_eq!(is(&state), (NodeStatus::Draining, at(2), Some(at(30))));
    for back in [to(NodeStatus::Active), C::RegisterNode(facts(1))] {
        play(&mut state, to(NodeStatus::Dead), 4).expect("silent for long");
        assert_eq!(is(&state).0, NodeStatus::Dead);
        play(&mut state, back, 5).expect("it is back");
        assert_eq!(is(&state), (NodeStatus::Draining, at(5), Some(at(30))));
    }
    play(&mut state, to(NodeStatus::Active), 6).expect("it may stay");
    assert_eq!(is(&state), (NodeStatus::Active, at(6), None));
    play(&mut state, to(NodeStatus::Dead), 7).expect("silent for long");
    let late = C::DrainNode { id, by: at(60) };
    assert!(matches!(play(&mut state, late, 8), Err(Rejection::InvalidState { .. })));
}

#[test]
fn data_keys_are_sealed_anew_together_or_not_at_all() {
    let mut state = Directory::default();
    let key = |master| {
        let sealed = vec![master];
        Box::new(DataKey { sealed, master: [master; 8], created_at: at(0) })
    };
    let keep = |owner, master| C::KeepDataKey { owner: OrgId(owner), key: key(master) };
    for (owner, master, done) in [
        (1, 7, true),
        // Whoever comes second uses the first one's.
        (1, 8, true),
        (2, 8, false),
        (2, 7, true),
    ] {
        assert_eq!(play(&mut state, keep(owner, master), 0).is_ok(), done, "{owner} {master}");
    }
    let turn = |known_by: &[u128], owners: &[u128]| C::TurnMasterKey {
        from: [7; 8],
        to: [8; 8],
        known_by: known_by.iter().copied().map(NodeId).collect(),
        sealed: owners.iter().map(|owner| (OrgId(*owner), vec![8])).collect(),
    };
    play(&mut state, C::RegisterNode(facts(5)), 0).expect("registered");
    for wrong in [turn(&[5], &[1]), turn(&[5], &[1, 2, 3]), turn(&[5], &[]), turn(&[], &[1, 2])] {
        assert_eq!(play(&mut state, wrong, 1).err(), Some(Rejection::StaleObject));
        assert_eq!(state.master_key(), Some([7; 8]));
    }
    play(&mut state, turn(&[5, 6], &[1, 2]), 2).expect("turned");
    let second = play(&mut state, turn(&[5], &[1, 2]), 3);
    assert_eq!(second.err(), Some(Rejection::StaleObject), "two changes at once");
    let rows: Vec<_> = state.data_keys.rows().map(|(_, row)| (row.master, &*row.sealed)).collect();
    assert_eq!(rows, [([8; 8], [8].as_slice()); 2]);
}

fn session() -> Session {
    Session {
        id: SESSION,
        tenant: TENANT,
        user: Some(UserId(3)),
        application: None,
        scopes: Role::Developer.scopes(),
        token_seconds: 3600,
        generation: 1,
        created_at: at(0),
        refreshed_at: at(0),
        client: "203.0.113.1".to_owned(),
        expires_at: at(1000),
        ends_at: at(3000),
        idle_seconds: 1000,
    }
}

/// What a refresh with this generation says: the session's next one, its end, or no.
fn refresh(state: &mut Shard, generation: u64, client: &str, seconds: u64) -> String {
    let command = S::RefreshSession { id: SESSION, generation, client: client.to_owned() };
    match play(state, command, seconds) {
        Ok(Reply::Session(session)) => format!("now {}", session.generation),
        Ok(_) => "ended".to_owned(),
        Err(reason) => format!("refused: {reason}"),
    }
}

#[test]
fn a_refresh_token_is_good_once_and_a_lost_answer_is_repeated() {
    let fresh = || {
        let mut state = Shard::default();
        let open = S::OpenSession(Box::new(session()));
        play(&mut state, open, 0).expect("opened");
        state
    };
    let home = "203.0.113.1";
    let mut state = fresh();
    assert_eq!(refresh(&mut state, 1, home, 10), "now 2");
    assert_eq!(refresh(&mut state, 1, home, 19), "now 2", "the answer was lost");
    assert_eq!(refresh(&mut state, 2, home, 20), "now 3");
    assert_eq!(refresh(&mut state, 1, home, 21), "ended", "two generations old");
    assert!(refresh(&mut state, 3, home, 22).starts_with("refused"), "the session is over");

    let mut state = fresh();
    refresh(&mut state, 1, home, 10);
    assert_eq!(refresh(&mut state, 1, home, 21), "ended", "after more than ten seconds");
    let mut state = fresh();
    refresh(&mut state, 1, home, 10);
    assert_eq!(refresh(&mut state, 1, "198.51.100.7", 11), "ended", "from elsewhere");

    let mut state = fresh();
    assert!(refresh(&mut state, 1, home, 1000).starts_with("refused"), "unused for too long");
    let mut state = fresh();
    for (generation, seconds) in [(1, 900), (2, 1800), (3, 2700)] {
        assert_eq!(
            refresh(&mut state, generation, home, seconds),
            format!("now {}", generation + 1)
        );
    }
    assert!(refresh(&mut state, 4, home, 3000).starts_with("refused"), "its time is over");
}

fn code() -> Code {
    Code {
        hash: [1; 32],
        tenant: TENANT,
        application: ApplicationId(5),
        user: UserId(3),
        redirect_uri: "https://app.example/back".to_owned(),
        scopes: Scopes::parse(["agents:read"]).expect("scopes"),
        challenge: Some([2; 32]),
        expires_at: at(60),
        session: None,
    }
}

#[test]
fn a_code_is_good_once_and_its_second_use_ends_what_came_of_it() {
    let mut state = Shard::default();
    let code = code();
    let redemption = Redemption {
        hash: [1; 32],
        application: ApplicationId(5),
        redirect_uri: "https://app.example/back".to_owned(),
        challenge: Some([2; 32]),
        session: Session { user: None, scopes: Scopes::default(), ..session() },
    };
    play(&mut state, S::IssueCode(Box::new(code)), 0).expect("kept");
    for wrong in [
        Redemption { application: ApplicationId(6), ..redemption.clone() },
        Redemption { redirect_uri: "https://app.example/".to_owned(), ..redemption.clone() },
        Redemption { challenge: None, ..redemption.clone() },
        Redemption { challenge: Some([3; 32]), ..redemption.clone() },
        Redemption { hash: [9; 32], ..redemption.clone() },
    ] {
        let told = play(&mut state, S::RedeemCode(Box::new(wrong)), 10);
        assert_eq!(told.err(), Some(Rejection::GrantInvalid));
    }
    let redeem = || S::RedeemCode(Box::new(redemption.clone()));
    let Ok(Reply::Session(opened)) = play(&mut state, redeem(), 20) else { panic!("no session") };
    assert_eq!(
        (opened.user, opened.scopes.to_vec()),
        (Some(UserId(3)), vec!["agents:read".into()])
    );
    assert!(matches!(play(&mut state, redeem(), 21), Ok(Reply::Done)), "used before");
    assert!(state.session(SESSION, at(22)).is_none(), "what came of it is over");
}

#[test]
fn who_logs_in_too_often_loses_the_oldest_session_of_that_kind() {
    let mut state = Shard::default();
    let open = |state: &mut Shard, session: Session| {
        play(state, S::OpenSession(Box::new(session)), 0).expect("opened");
    };
    let other = |session: Session| Session { user: Some(UserId(99)), ..session };
    open(&mut state, other(Session { id: SessionId(1), ..session() }));
    for id in 2..=101 {
        open(&mut state, Session { id: SessionId(id), ..session() });
    }
    assert!(state.session(SessionId(2), at(1)).is_some(), "a hundred are not too many");
    // As after a snapshot.
    state.reindex();
    open(&mut state, Session { id: SessionId(102), ..session() });
    assert!(state.session(SessionId(2), at(1)).is_none(), "the oldest");
    play(&mut state, S::CloseSession { id: SessionId(50) }, 1).expect("closed");
    open(&mut state, Session { id: SessionId(103), ..session() });
    assert!(state.session(SessionId(3), at(1)).is_some(), "there was room again");
    assert!(state.session(SessionId(1), at(1)).is_some(), "somebody else's");
}

#[test]
fn a_login_and_its_row_are_one_change() {
    let mut state = Shard::default();
    let open = entry(S::OpenSession(Box::new(session())), 0);
    let login = Entry { audit: Some(Arc::new(audited(1))), ..open };
    for _ in 0..2 {
        apply(&mut state, &login).0.result.expect("logged in");
        let written: Vec<_> = state.audit.rows().map(|(_, row)| row.id).collect();
        assert_eq!(written, [AuditId(1)], "once, though the change comes twice");
    }
    assert!(state.session(SESSION, at(1)).is_some());
    let unknown = S::RefreshSession { id: SessionId(8), generation: 1, client: String::new() };
    let refused = Entry { audit: Some(Arc::new(audited(2))), ..entry(unknown, 1) };
    apply(&mut state, &refused).0.result.expect_err("there is no such session");
    assert_eq!(state.audit.rows().count(), 1, "what was refused has no row that it succeeded");
}

#[test]
fn rows_that_come_again_with_newer_ones_are_written_once_and_hang_together() {
    let mut state = Shard::default();
    // As often as it takes from the beginning, late once more, and one of the middle by another way before.
    let batches = [
        vec![1, 2],
        vec![1, 2],
        vec![1, 2, 3, 4],
        vec![1, 2, 3],
        vec![6],
        vec![4, 5, 6, 7],
        vec![7, 7, 8],
    ];
    for ids in batches {
        let rows = ids.into_iter().map(|id| Arc::new(audited(id))).collect();
        play(&mut state, S::Audit(rows), 0).expect("written");
    }
    let mut before = [0; 32];
    for id in [1, 2, 3, 4, 6, 5, 7, 8] {
        let row = state.audit.get(&(TENANT.org.0, AuditId(id))).expect("it is here");
        assert_eq!((row.previous, row.hash), (before, row.after(before).hash), "{id}");
        before = row.hash;
    }
    assert_eq!((state.audit_head(TENANT.org), state.audit.rows().count()), (before, 8));
}

#[test]
fn wrong_passwords_pause_guessing_until_the_window_has_moved_on() {
    let (mut state, guess) = (Shard::default(), [7; 32]);
    let wrong = || S::NoteLogin { guess, org: None, is_right: false };
    let right = || S::NoteLogin { guess, org: None, is_right: true };
    for second in 0..5 {
        play(&mut state, wrong(), second).expect("counted");
    }
    let paused = Rejection::LoginThrottled { until: at(900) };
    assert_eq!(play(&mut state, wrong(), 10).err(), Some(paused.clone()));
    assert_eq!(play(&mut state, right(), 899).err(), Some(paused), "also if it is right");
    assert!(play(&mut state, right(), 900).is_ok());
    assert!(play(&mut state, wrong(), 901).is_ok(), "a right one begins anew");
    assert!(!state.has_expired(at(901)));
    assert!(state.has_expired(at(10_000)), "and all of it is forgotten");
}

#[test]
fn a_right_password_forgets_wrong_ones_of_its_own_organization_alone() {
    let (mut state, guess) = (Shard::default(), [7; 32]);
    let (own, other) = (None, Some(OrgId(2)));
    let note = |org, is_right| S::NoteLogin { guess, org, is_right };
    for second in 0..4 {
        play(&mut state, note(other, false), second).expect("counted");
    }
    play(&mut state, note(own, true), 4).expect("heard");
    play(&mut state, note(own, false), 5).expect("counted");
    let paused = Rejection::LoginThrottled { until: at(900) };
    assert_eq!(play(&mut state, note(own, true), 6).err(), Some(paused), "the fifth");
    play(&mut state, note(other, true), 900).expect("the first counts no more");
    for second in 901..905 {
        play(&mut state, note(other, false), second).expect("its own wrong ones were forgotten");
    }
}

fn user(id: u128, role: Role) -> User {
    User {
        id: UserId(id),
        org: TENANT.org,
        email: format!("{id}@example.com"),
        password_hash: String::new(),
        role,
        created_at: at(0),
        name: None,
        updated_at: at(0),
        revision: 1,
        sessions_since: at(0),
    }
}

fn key(id: u128, created_by: Option<&str>) -> ApiKey {
    ApiKey {
        id: ApiKeyId(id),
        tenant: TENANT,
        name: "key".into(),
        hash: [u8::try_from(id).expect("small"); 32],
        last4: "".into(),
        scopes: Scopes::all(),
        created_at: at(0),
        allowed_ips: Box::default(),
        expires_at: None,
        agent_ids: Box::default(),
        created_by: created_by.map(Into::into),
        previous: None,
        last_used: None,
        updated_at: at(0),
        revision: 1,
        rate_limit: None,
    }
}

fn organization() -> Directory {
    let mut state = Directory::default();
    let organization = Organization {
        id: TENANT.org,
        name: "first".to_owned(),
        created_at: at(0),
        tier: Tier::Enterprise,
        updated_at: at(0),
        revision: 1,
    };
    let first = Bootstrap {
        organization,
        owner: user(1, Role::Owner),
        keys: vec![key(1, None)],
        clouds: vec![],
    };
    play(&mut state, C::Bootstrap(Box::new(first)), 0).expect("founded");
    state
}

fn invitation() -> Invitation {
    Invitation {
        id: domain::InvitationId(1),
        org: TENANT.org,
        email: "new@example.com".to_owned(),
        role: Role::Admin,
        hash: [8; 32],
        invited_by: String::new(),
        created_at: at(0),
        expires_at: at(100),
    }
}

#[test]
fn a_key_acts_as_whoever_made_it_however_long_the_detour() {
    let mut state = organization();
    let mut make = |id: u128, by: Option<String>| {
        let key = key(id, by.as_deref());
        play(&mut state, C::CreateApiKey { key: Box::new(key.clone()), answer: vec![] }, 1)
            .expect("made");
        key
    };
    let admins = make(2, Some(UserId(2).to_string()));
    let detour = make(3, Some(admins.id.to_string()));
    let owners = make(4, Some(UserId(1).to_string()));
    let lost = make(5, Some(ApiKeyId(77).to_string()));
    let firsts = make(6, Some(ApiKeyId(1).to_string()));
    let invited = user(2, Role::Admin);
    let invitation = Invitation { email: invited.email.clone(), ..invitation() };
    let by = Some(Role::Owner);
    let invite =
        C::Invite { invitation: Box::new(invitation), by, scopes: Scopes::all(), answer: vec![] };
    play(&mut state, invite, 2).expect("invited");
    play(&mut state, C::AcceptInvitation { hash: [8; 32], user: Box::new(invited) }, 3)
        .expect("came");
    let roles = [&admins, &detour, &owners, &lost, &firsts].map(|key| state.role_of_key(key));
    let (owner, admin) = (Some(Role::Owner), Some(Role::Admin));
    assert_eq!(roles, [admin, admin, owner, None, owner]);

    let change = |by, id: u128, patch: UserPatch| C::UpdateUser {
        org: TENANT.org,
        id: UserId(id),
        patch,
        by,
        scopes: Scopes::all(),
        if_match: None,
    };
    let to = |role| UserPatch { role: Some(role), ..UserPatch::default() };
    let address = UserPatch { email: Some("new@example.com".to_owned()), ..UserPatch::default() };
    for by in [None, admin] {
        let told = play(&mut state, change(by, 2, to(Role::Owner)), 4);
        assert!(matches!(told, Err(Rejection::RoleTooHigh(_))), "{by:?}");
        let told = play(&mut state, change(by, 1, address.clone()), 4);
        assert!(matches!(told, Err(Rejection::RoleTooHigh(_))), "an owner's address, by {by:?}");
    }
    let told = play(&mut state, change(owner, 1, to(Role::Viewer)), 5);
    assert_eq!(told.err(), Some(Rejection::LastOwner));
    assert!(play(&mut state, change(owner, 2, to(Role::Owner)), 6).is_ok());
    assert!(play(&mut state, change(owner, 1, to(Role::Viewer)), 7).is_ok());
}

#[test]
fn ended_sessions_are_known_until_their_last_token_has_expired() {
    let mut state = Directory::default();
    let day = 24 * 3600;
    for (id, seconds) in [(1, 10), (2, 20), (3, day)] {
        play(&mut state, C::EndSession(SessionId(id)), seconds).expect("ended");
    }
    let known = |state: &Directory| -> Vec<u128> {
        state.ended_sessions.rows().map(|(id, _)| id.0).collect()
    };
    assert_eq!(known(&state), [1, 2, 3]);
    play(&mut state, C::EndSession(SessionId(4)), day + 10).expect("ended");
    assert_eq!(known(&state), [2, 3, 4], "the longest token is good for a day");
}

fn event(number: u128) -> Occurrence {
    Occurrence {
        id: EventId::new(at(0), number),
        tenant: TENANT,
        kind: Kind::AgentDeployed,
        at: at(0),
        data: "{}".to_owned(),
        agent: None,
    }
}

fn hook() -> Webhook {
    Webhook {
        id: HOOK,
        tenant: TENANT,
        url: "https://receiver.example".to_owned(),
        events: vec!["webhook.disabled".to_owned()],
        active: true,
        description: String::new(),
        sealed: vec![],
        secret_hint: String::new(),
        previous: None,
        ordering: Ordering::None,
        rate_limit_per_s: None,
        metadata: BTreeMap::new(),
        enabled_at: at(0),
        disabled_at: None,
        disabled_reason: None,
        created_at: at(0),
        updated_at: at(0),
        revision: 1,
    }
}

fn audited(id: u128) -> Audited {
    Audited {
        id: AuditId(id),
        org: TENANT.org,
        mode: Mode::Live,
        at: at(0),
        actor: Actor { kind: "user".into(), id: "usr_1".into(), ip: "::1".into() },
        action: "mintJoinToken".to_owned(),
        target: "/v1/cluster/join-tokens".to_owned(),
        outcome: "succeeded".to_owned(),
        request_id: RequestId(1),
        count: 1,
        hash: [0; 32],
        previous: [0; 32],
    }
}

fn tried(id: DeliveryId, seconds: u64, status: u16, next_at: Option<Timestamp>) -> S {
    tried_as_asked(id, seconds, status, next_at, (0, 0))
}

fn tried_as_asked(
    id: DeliveryId,
    seconds: u64,
    status: u16,
    next_at: Option<Timestamp>,
    (asked, tried): (u32, u32),
) -> S {
    let attempt = Attempt {
        at: at(seconds),
        status_code: Some(status),
        duration_ms: 1,
        error: None,
        answer: "x".repeat(4096),
        node_id: NodeId(1),
        cause: Cause::Schedule,
    };
    S::NoteAttempts(vec![Tried {
        webhook: HOOK,
        id,
        attempt,
        asked,
        tried,
        next_at,
        is_gone: false,
    }])
}

#[test]
fn an_event_is_in_line_once_and_an_attempt_is_counted_once() {
    let mut state = Shard::default();
    let enqueue = |numbers: &[u128]| S::Enqueue {
        wanted: numbers.iter().map(|number| (HOOK, event(*number))).collect(),
        cause: Cause::Schedule,
    };
    play(&mut state, enqueue(&[1, 2, 1]), 1).expect("in line");
    play(&mut state, enqueue(&[2, 3]), 2).expect("in line");
    let numbers: BTreeMap<DeliveryId, u64> =
        state.pending_of(HOOK).map(|row| (row.id, row.sequence)).collect();
    let wanted = [1, 2, 3]
        .map(|number| (id_of(&event(number), HOOK), u64::try_from(number).expect("small")));
    assert_eq!(numbers, BTreeMap::from(wanted), "once each, numbered without a gap");

    let first = id_of(&event(1), HOOK);
    for _ in 0..3 {
        play(&mut state, tried(first, 5, 500, Some(at(65))), 5).expect("noted");
    }
    let row = state.delivery(HOOK, first).expect("it is there");
    assert_eq!((row.attempts.len(), row.tried, row.next_at), (1, 1, Some(at(65))));
    play(&mut state, tried(first, 65, 200, None), 65).expect("noted");
    let row = state.delivery(HOOK, first).expect("it is there");
    assert_eq!(row.status, Status::Succeeded);
    assert!(row.attempts[0].answer.len() <= 256, "earlier answers are shortened");
    assert_eq!(state.hooks.get(&HOOK).map(|hook| hook.pending), Some(2));
    play(&mut state, enqueue(&[1]), 70).expect("in line");
    assert_eq!(state.pending_of(HOOK).count(), 2, "what arrived is not sent again");

    // Sent again, it stays for thirty days from then.
    let again = S::Redeliver { webhook: HOOK, ids: vec![first], cause: Cause::Manual };
    let day = 86_400;
    play(&mut state, again, 20 * day).expect("again");
    // One that was under way does not count as what was asked for.
    play(&mut state, tried(first, 20 * day, 200, None), 20 * day).expect("noted");
    let row = state.delivery(HOOK, first).expect("it is there");
    assert_eq!((row.status, row.next_at), (Status::Pending, Some(at(20 * day))));
    assert_eq!(row.cause, Cause::Manual);
    play(&mut state, tried_as_asked(first, 20 * day + 1, 200, None, (1, 2)), 20 * day + 1)
        .expect("noted");
    assert_eq!(state.delivery(HOOK, first).expect("it is there").status, Status::Succeeded);
    play(&mut state, S::Sweep, 31 * day).expect("swept");
    assert!(state.delivery(HOOK, first).is_some());
    play(&mut state, S::Sweep, 51 * day).expect("swept");
    assert!(state.delivery(HOOK, first).is_none());
}

#[test]
fn what_a_change_tells_waits_in_its_group_until_it_was_told() {
    let mut state = organization();
    play(&mut state, C::CreateWebhook(Box::new(hook())), 1).expect("made");
    let disable = || C::DisableWebhook { id: HOOK, reason: "gone".to_owned() };
    play(&mut state, disable(), 2).expect("disabled");
    play(&mut state, disable(), 3).expect("nothing more to do");
    let waiting = state.outbox.oldest(10, |_| false);
    assert_eq!(waiting.events.len(), 1, "one change, one event");
    assert_eq!(waiting.events[0].1.kind, Kind::WebhookDisabled);
    let up_to = waiting.up_to.expect("a number");
    play(&mut state, C::Told { up_to }, 4).expect("told");
    assert!(state.outbox.oldest(10, |_| false).up_to.is_none());
    let grace = Duration::from_secs(60);
    let rotate = C::RotateApiKey {
        tenant: TENANT,
        id: ApiKeyId(1),
        hash: [9; 32],
        last4: "wxyz".to_owned(),
        grace,
        answer: vec![],
    };
    play(&mut state, rotate, 10).expect("rotated");
    let key = state.api_key(&[1; 32]).expect("the old secret is known still");
    assert!(key.is_good(&[1; 32], at(69)) && !key.is_good(&[1; 32], at(70)));
    assert!(key.is_good(&[9; 32], at(1_000_000)));
}

#[test]
fn a_row_of_the_audit_log_is_kept_with_its_change_and_only_with_it() {
    let mut state = Directory::default();
    let row = |id| Some(Arc::new(audited(id)));
    let key = || Some(Keyed { hash: [3; 32], fingerprint: [1; 32] });
    let change = |audit, key| {
        let token = JoinToken { hash: [1; 32], expires_at: at(100) };
        Entry { audit, key, ..entry(C::MintJoinToken(Box::new(token)), 1) }
    };
    apply(&mut state, &change(row(1), key())).0.result.expect("made");
    assert!(apply(&mut state, &change(row(2), key())).0.replayed, "the same call again");
    let refused =
        Entry { audit: row(3), ..entry(C::DeleteAgent { tenant: TENANT, id: AgentId(9) }, 2) };
    assert!(apply(&mut state, &refused).0.result.is_err());
    let waiting = state.outbox.oldest(10, |_| false);
    assert_eq!(waiting.audited.iter().map(|(_, row)| row.id).collect::<Vec<_>>(), [AuditId(1)]);
}

#[test]
fn what_was_ever_written_is_still_readable() {
    use domain::codec::encode;
    let data_key = DataKey { sealed: vec![1; 72], master: [7; 8], created_at: at(0) };
    let application = Application {
        id: ApplicationId(5),
        tenant: TENANT,
        name: "client".to_owned(),
        redirect_uris: vec!["https://app.example/back".to_owned()],
        scopes: Scopes::all(),
        secret_hash: Some([4; 32]),
        token_seconds: 3600,
        created_at: at(0),
    };
    let secret = Secret {
        tenant: TENANT,
        cloud_id: None,
        name: "TOKEN".to_owned(),
        sealed: vec![2; 60],
        version: 3,
        created_at: at(0),
        updated_at: at(5),
    };
    let key = ApiKey {
        allowed_ips: Box::new(["203.0.113.0/24".parse().expect("a range")]),
        agent_ids: Box::new([AgentId(1)]),
        previous: Some(Box::new(([9; 32], at(60)))),
        ..key(1, Some("usr_1"))
    };
    let mut state = Shard::default();
    let wanted = vec![(HOOK, event(1))];
    let enqueue = S::Enqueue { wanted, cause: Cause::Schedule };
    play(&mut state, enqueue.clone(), 1).expect("in line");
    let id = id_of(&event(1), HOOK);
    play(&mut state, tried(id, 5, 500, Some(at(65))), 5).expect("noted");
    let delivery = state.delivery(HOOK, id).expect("it is there");
    let mint = C::MintJoinToken(Box::new(JoinToken { hash: [1; 32], expires_at: at(100) }));
    let audit = Some(Arc::new(audited(1)));
    let (directory, shard) = (read::<Entry<C>>, read::<Entry<S>>);
    let create = C::CreateApiKey { key: Box::new(key.clone()), answer: vec![1] };
    hold(
        "accounts-0.1.txt",
        &[
            ("entry mint, audited", encode(&Entry { audit, ..entry(mint, 1) }), directory),
            ("entry create key", encode(&entry(create, 2)), directory),
            ("entry enqueue", encode(&entry(enqueue, 3)), shard),
            ("entry audit", encode(&entry(S::Audit(vec![Arc::new(audited(2))]), 4)), shard),
            ("row key", encode(&key), read::<ApiKey>),
            ("row user", encode(&user(1, Role::Owner)), read::<User>),
            ("row invitation", encode(&invitation()), read::<Invitation>),
            ("row application", encode(&application), read::<Application>),
            ("row session", encode(&session()), read::<Session>),
            ("row code", encode(&code()), read::<Code>),
            ("row secret", encode(&secret), read::<Secret>),
            ("row data key", encode(&data_key), read::<DataKey>),
            ("row webhook", encode(&hook()), read::<Webhook>),
            ("row delivery", encode(&*delivery), read::<Delivery>),
            ("row audited", encode(&audited(3)), read::<Audited>),
            ("row event", encode(&event(2)), read::<Occurrence>),
        ],
    );
}
