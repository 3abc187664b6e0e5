//! Who may do what: the one table that requests are checked by, that the document shows and that the
//! tests walk. An operation without a row here is served to nobody.

use std::sync::OnceLock;

use domain::account::{Mode, Scope};
use http::{Method, StatusCode};
use serde_json::{Value, json};

use crate::{caller::Identity, error::Problem};

/// What an operation asks of its caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// Nothing: it is open, or proves itself otherwise.
    Nobody,
    /// Valid credentials.
    Somebody,
    /// Any of these scopes.
    Any(&'static [Scope]),
    /// This scope, with live credentials: people belong to an organization, not to one of its modes.
    Live(Scope),
    /// This scope, with live credentials of the organization that looks after the cluster.
    Operator(Scope),
}

use Need::{Any, Live, Nobody, Operator, Somebody};
use Scope::{
    Admin, AgentsInvoke, AgentsRead, AgentsWrite, CloudsRead, CloudsWrite, ClusterRead,
    SecretsWrite, WebhooksRead, WebhooksWrite,
};

const READ: Need = Any(&[AgentsRead]);
const WRITE: Need = Any(&[AgentsWrite]);
const INVOKE: Need = Any(&[AgentsInvoke]);
const JOBS: Need = Any(&[AgentsInvoke, AgentsRead]);
const ADMIN: Need = Any(&[Admin]);
const HOOKS_READ: Need = Any(&[WebhooksRead]);
const HOOKS_WRITE: Need = Any(&[WebhooksWrite]);
const SECRETS: Need = Any(&[SecretsWrite]);

/// Every operation of the document, by its `operationId`.
pub const ACCESS: &[(&str, Need)] = &[
    ("listAgents", READ),
    ("createAgent", WRITE),
    ("getAgent", READ),
    ("updateAgent", WRITE),
    ("deleteAgent", WRITE),
    ("startAgent", WRITE),
    ("stopAgent", WRITE),
    ("redeployAgent", WRITE),
    ("rollbackAgent", WRITE),
    ("listInstances", READ),
    ("listVersions", READ),
    ("listDeployments", READ),
    ("getDeployment", READ),
    ("cancelDeployment", WRITE),
    ("rollbackToDeployment", WRITE),
    ("getDeploymentLogs", READ),
    ("getAgentLogs", READ),
    ("getAgentMetrics", READ),
    ("invokeAgent", INVOKE),
    ("passThrough", INVOKE),
    ("listJobs", JOBS),
    ("getJob", JOBS),
    ("getJobOutput", JOBS),
    ("cancelJob", INVOKE),
    ("retryJob", INVOKE),
    ("deleteJob", INVOKE),
    ("listClouds", Any(&[CloudsRead])),
    ("createCloud", Any(&[CloudsWrite])),
    ("getCloud", Any(&[CloudsRead])),
    ("updateCloud", Any(&[CloudsWrite])),
    ("deleteCloud", Any(&[CloudsWrite])),
    ("listCloudAgents", READ),
    ("createUpload", WRITE),
    ("getUpload", WRITE),
    ("deleteUpload", WRITE),
    ("putUpload", Nobody),
    ("getCluster", Operator(ClusterRead)),
    ("getClusterHealth", Operator(ClusterRead)),
    ("listNodes", Operator(ClusterRead)),
    ("getNode", Operator(ClusterRead)),
    ("listShards", Operator(ClusterRead)),
    ("drainNode", Operator(Admin)),
    ("activateNode", Operator(Admin)),
    ("removeNode", Operator(Admin)),
    ("getClusterConfig", Operator(ClusterRead)),
    ("putClusterConfig", Operator(Admin)),
    ("watchCluster", Operator(ClusterRead)),
    ("createJoinToken", Operator(Admin)),
    ("listSnapshots", Operator(ClusterRead)),
    ("createSnapshot", Operator(Admin)),
    ("getSnapshot", Operator(ClusterRead)),
    ("getSnapshotArchive", Operator(Admin)),
    ("deleteSnapshot", Operator(Admin)),
    ("login", Nobody),
    ("refreshToken", Nobody),
    ("logout", Somebody),
    ("whoAmI", Somebody),
    ("changePassword", Somebody),
    ("exchangeToken", Nobody),
    ("revokeToken", Nobody),
    ("introspectToken", Nobody),
    ("listApplications", ADMIN),
    ("createApplication", ADMIN),
    ("deleteApplication", ADMIN),
    ("listApiKeys", ADMIN),
    ("createApiKey", ADMIN),
    ("getApiKey", ADMIN),
    ("updateApiKey", ADMIN),
    ("rotateApiKey", ADMIN),
    ("deleteApiKey", ADMIN),
    ("listUsers", ADMIN),
    ("getUser", ADMIN),
    ("updateUser", Live(Admin)),
    ("deleteUser", Live(Admin)),
    ("listInvitations", ADMIN),
    ("createInvitation", Live(Admin)),
    ("deleteInvitation", Live(Admin)),
    ("acceptInvitation", Nobody),
    ("listOrganizations", Operator(Admin)),
    ("createOrganization", Operator(Admin)),
    ("getOrganization", Operator(Admin)),
    ("updateOrganization", Operator(Admin)),
    ("listSecrets", SECRETS),
    ("getSecret", SECRETS),
    ("putSecret", SECRETS),
    ("deleteSecret", SECRETS),
    ("listAuditLog", ADMIN),
    ("listWebhooks", HOOKS_READ),
    ("createWebhook", HOOKS_WRITE),
    ("getWebhook", HOOKS_READ),
    ("updateWebhook", HOOKS_WRITE),
    ("deleteWebhook", HOOKS_WRITE),
    ("enableWebhook", HOOKS_WRITE),
    ("rotateWebhookSecret", HOOKS_WRITE),
    ("testWebhook", HOOKS_WRITE),
    ("recoverWebhook", HOOKS_WRITE),
    ("listDeliveries", HOOKS_READ),
    ("getDelivery", HOOKS_READ),
    ("redeliver", HOOKS_WRITE),
    ("listEvents", HOOKS_READ),
    ("getEvent", HOOKS_READ),
    ("redeliverEvent", HOOKS_WRITE),
    ("listEventTypes", HOOKS_READ),
];

/// Operations that look and change nothing although they are no `GET`: they are not audited.
const NOT_AUDITED: [&str; 3] = ["invokeAgent", "passThrough", "introspectToken"];

/// An operation, as a request names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operation {
    /// Its `operationId`.
    pub id: &'static str,
    /// What it asks.
    pub need: Need,
}

struct Route {
    method: Method,
    parts: Vec<String>,
    operation: Operation,
}

/// What an operation asks; `None` for one that is not in the table.
pub fn need_of(id: &str) -> Option<Need> {
    ACCESS.iter().find(|(known, _)| *known == id).map(|(_, need)| *need)
}

fn routes() -> &'static [Route] {
    static ROUTES: OnceLock<Vec<Route>> = OnceLock::new();
    ROUTES.get_or_init(|| {
        let document: Value = serde_json::from_str(&crate::document()).unwrap_or_default();
        let mut routes = vec![];
        for (path, methods) in document["paths"].as_object().into_iter().flatten() {
            for (method, operation) in methods.as_object().into_iter().flatten() {
                let id = operation["operationId"].as_str().unwrap_or_default();
                let row = ACCESS.iter().find(|(known, _)| *known == id);
                let (Some((id, need)), Ok(method)) = (row, method.to_uppercase().parse()) else {
                    continue;
                };
                let parts = path.split('/').skip(1).map(str::to_owned).collect();
                routes.push(Route { method, parts, operation: Operation { id, need: *need } });
            }
        }
        routes
    })
}

/// Where people log in and let applications in: a page, no operation of the document, but what happens there is
/// audited like one.
pub(crate) const CONSENT: &str = "/oauth/authorize";

/// The operation that a request means; `None` where there is none.
pub fn operation_of(method: &Method, path: &str) -> Option<Operation> {
    let parts: Vec<&str> = path.strip_prefix('/')?.split('/').collect();
    if let ["v1", "agents", _, "http", ..] = parts.as_slice() {
        return Some(Operation { id: "passThrough", need: INVOKE });
    }
    if (method, path) == (&Method::POST, CONSENT) {
        return Some(Operation { id: "authorize", need: Nobody });
    }
    let method = if *method == Method::HEAD { &Method::GET } else { method };
    let fits = |route: &&Route| {
        route.method == *method
            && route.parts.len() == parts.len()
            && route
                .parts
                .iter()
                .zip(&parts)
                .all(|(want, part)| want.starts_with('{') || want == part)
    };
    routes().iter().find(fits).map(|route| route.operation)
}

impl Operation {
    /// Whether a change that it makes belongs into the audit log.
    pub fn is_audited(&self, method: &Method) -> bool {
        let changes = !matches!(*method, Method::GET | Method::HEAD | Method::OPTIONS);
        changes && !NOT_AUDITED.contains(&self.id)
    }

    /// Whether a caller may do it. `operator` tells whether theirs is the organization that looks
    /// after the cluster.
    pub fn permit(&self, identity: &Identity, operator: bool) -> Result<(), Problem> {
        identity.restricted_to(self.id)?;
        match self.need {
            Nobody | Somebody => Ok(()),
            Any(scopes) => identity.permit_any(scopes),
            Live(scope) => {
                identity.permit_any(&[scope])?;
                self.needs_live(identity)
            }
            Operator(scope) => {
                identity.permit_any(&[scope])?;
                self.needs_live(identity)?;
                if operator {
                    return Ok(());
                }
                let message = "this is for the organization that looks after the cluster";
                let (status, details) = (StatusCode::FORBIDDEN, json!({ "operation": self.id }));
                Err(Problem::new(status, "INSUFFICIENT_SCOPE", message).with(details))
            }
        }
    }

    fn needs_live(&self, identity: &Identity) -> Result<(), Problem> {
        if identity.tenant.mode == Mode::Live {
            return Ok(());
        }
        let message = "this concerns more than test mode; use live credentials";
        let details = json!({ "operation": self.id });
        Err(Problem::new(StatusCode::FORBIDDEN, "TEST_MODE_ONLY", message).with(details))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_and_the_document_name_the_same_operations() {
        let in_routes: Vec<_> = routes().iter().map(|route| route.operation.id).collect();
        for (id, _) in ACCESS {
            let is_there = in_routes.contains(id) || *id == "passThrough";
            assert!(is_there, "{id} has a row but is no operation");
        }
        let document: Value = serde_json::from_str(&crate::document()).expect("JSON");
        for methods in document["paths"].as_object().expect("paths").values() {
            for operation in methods.as_object().expect("methods").values() {
                let id = operation["operationId"].as_str().expect("an id");
                assert!(need_of(id).is_some(), "{id} has no row in ACCESS");
            }
        }
    }

    #[test]
    fn a_request_is_found_by_method_and_path() {
        let id = |method: Method, path| operation_of(&method, path).map(|operation| operation.id);
        for (method, path, expected) in [
            (Method::GET, "/v1/agents", Some("listAgents")),
            (Method::HEAD, "/v1/agents/agent_1", Some("getAgent")),
            (Method::POST, "/v1/agents/agent_1/invoke", Some("invokeAgent")),
            (Method::PUT, "/v1/agents/agent_1/http/a/b", Some("passThrough")),
            (Method::DELETE, "/v1/agents", None),
            (Method::GET, "/v1/agents/a/b/c", None),
            (Method::GET, "/", None),
        ] {
            assert_eq!(id(method, path), expected, "{path}");
        }
    }
}
