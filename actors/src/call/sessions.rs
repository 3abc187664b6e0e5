//! Sessions and codes, kept in the shard of their organization; and wrong passwords, in one that is the same
//! whether there is such an account or not.

use domain::{
    OrgId, Rejection, SessionId,
    account::{Code, Redemption, Session},
    audit::Audited,
    directory,
    shard::{Command, Reply},
};

use super::{Records, RecordsWanted, Service, ServiceError};

impl Service {
    /// The shard of an organization.
    pub fn home_of(&self, org: OrgId) -> u16 {
        self.world.home_of(org)
    }

    async fn at_home(&self, org: OrgId, command: Command) -> Result<Reply, ServiceError> {
        let answer = self.world.ask_shard(self.home_of(org), command, None, None).await?;
        Ok(answer.result?)
    }

    /// Opens a session.
    pub async fn open_session(&self, session: Session) -> Result<(), ServiceError> {
        let org = session.tenant.org;
        self.at_home(org, Command::OpenSession(Box::new(session))).await.map(drop)
    }

    /// Counts a wrong password, or forgets them after a right one in the same organization. `guess` stands for
    /// the e-mail address and the client: after too many wrong ones it is refused either way.
    pub async fn note_login(
        &self,
        guess: [u8; 32],
        org: Option<OrgId>,
        is_right: bool,
    ) -> Result<(), ServiceError> {
        let shard = self.world.ports.ledger.home(&guess);
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
    pub async fn audit(&self, org: OrgId, rows: Vec<Audited>) -> Result<(), ServiceError> {
        self.at_home(org, Command::Audit(rows)).await.map(drop)
    }
}
