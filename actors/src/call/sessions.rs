//! Sessions and codes, kept in the shard of their organization; and wrong passwords, in one that is the same
//! whether there is such an account or not.

use std::sync::Arc;

use domain::{
    OrgId, Rejection, SessionId,
    account::{Code, Redemption, Session},
    audit::Audited,
    directory,
    machine::Entry,
    shard::{Command, Reply},
};

use super::{Records, RecordsWanted, Service, ServiceError, auditing};

impl Service {
    /// The shard of an organization.
    pub fn home_of(&self, org: OrgId) -> u16 {
        self.world.home_of(org)
    }

    async fn at_home(&self, org: OrgId, command: Command) -> Result<Reply, ServiceError> {
        self.at_home_audited(org, command, None).await
    }

    /// A change where the organization's log is, with its row of that log.
    async fn at_home_audited(
        &self,
        org: OrgId,
        command: Command,
        audit: Option<Arc<Audited>>,
    ) -> Result<Reply, ServiceError> {
        let entry = Entry { audit, ..Entry::new(self.world.now(), command) };
        let answer = self.world.ports.ledger.change_shard(self.home_of(org), entry).await?;
        Ok(answer.result?)
    }

    /// Opens a session. The row of the login goes with it, if there is one.
    pub async fn open_session(&self, session: Session) -> Result<(), ServiceError> {
        let (org, session) = (session.tenant.org, Box::new(session));
        let row = auditing::take_of_stranger();
        let open = Command::OpenSession(session);
        let opened = self.at_home_audited(org, open, row.clone()).await;
        if opened.is_err() {
            auditing::put_back_of_stranger(row);
        }
        opened.map(drop)
    }

    /// Counts a wrong password, or forgets them after a right one in the same organization. `guess` stands for
    /// the e-mail address and the client: after too many wrong ones it is refused either way.
    pub async fn note_login(
        &self,
        guess: [u8; 32],
        org: Option<OrgId>,
        is_right: bool,
    ) -> Result<(), ServiceError> {
        let ledger = &self.world.ports.ledger;
        let shard = ledger.home(&guess);
        if is_right && ledger.has_shard(shard) {
            // Most people guess nothing: then there is nothing to forget, and nothing to write.
            ledger.refresh_shard(shard).await?;
            if ledger.shard(shard).read().throttles.get(&guess).is_none() {
                return Ok(());
            }
        }
        let command = Command::NoteLogin { guess, org, is_right };
        self.world.ask_shard(shard, command, None, None).await?.result?;
        Ok(())
    }

    /// Moves a session to its next refresh token. `None`: an old one was used, and the session ended.
    pub async fn refresh_session(
        &self,
        org: OrgId,
        id: SessionId,
        generation: u64,
        client: String,
    ) -> Result<Option<Session>, ServiceError> {
        let reply = self.at_home(org, Command::RefreshSession { id, generation, client }).await?;
        if let Reply::Session(session) = reply {
            return Ok(Some(*session));
        }
        self.end_tokens(id).await?;
        Ok(None)
    }

    /// A session that goes on.
    pub async fn session(
        &self,
        org: OrgId,
        id: SessionId,
    ) -> Result<Option<Session>, ServiceError> {
        let found = self.records(self.home_of(org), RecordsWanted::Session(id)).await?;
        let Records::Session(session) = found else { return Ok(None) };
        Ok(session.map(|session| *session))
    }

    /// Ends a session and its access tokens.
    pub async fn close_session(&self, org: OrgId, id: SessionId) -> Result<(), ServiceError> {
        self.end_tokens(id).await?;
        self.at_home(org, Command::CloseSession { id }).await.map(drop)
    }

    /// No node takes an access token of this session any more.
    pub async fn end_tokens(&self, id: SessionId) -> Result<(), ServiceError> {
        if self.world.directory().read().ended_sessions.contains(&id) {
            return Ok(());
        }
        let ended = directory::Command::EndSession(id);
        self.world.ask(ended, None).await?.result?;
        Ok(())
    }

    /// Keeps a code until it is traded.
    pub async fn issue_code(&self, code: Code) -> Result<(), ServiceError> {
        let org = code.tenant.org;
        self.at_home(org, Command::IssueCode(Box::new(code))).await.map(drop)
    }

    /// Trades a code for a session, once.
    pub async fn redeem_code(
        &self,
        org: OrgId,
        redemption: Redemption,
    ) -> Result<Session, ServiceError> {
        let reply = self.at_home(org, Command::RedeemCode(Box::new(redemption))).await?;
        if let Reply::SessionEnded(id) = reply {
            self.end_tokens(id).await?;
        }
        let Reply::Session(session) = reply else { return Err(Rejection::GrantInvalid.into()) };
        Ok(*session)
    }

    /// Writes rows of an organization's audit log.
    pub async fn audit(&self, org: OrgId, rows: Vec<Arc<Audited>>) -> Result<(), ServiceError> {
        self.at_home(org, Command::Audit(rows)).await.map(drop)
    }
}
