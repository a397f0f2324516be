//! Injected faults, counters and a log of requests.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// Number of requests kept in the log.
const LOG_LIMIT: usize = 8192;

/// A pattern of requests: `patch pods/status`, `get pods`, `* leases`, `watch *`, `patch pods/status
/// default/web`. A resource without `/` means the object itself, not its subresources; `pods/*` means both.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Requests {
    verb: String,
    resource: String,
    subresource: String,
    object: Option<String>,
}

impl From<&str> for Requests {
    fn from(text: &str) -> Self {
        let mut words = text.split_whitespace();
        let verb = words.next().unwrap_or("*").to_owned();
        let what = words.next().unwrap_or("*/*");
        let (resource, subresource) =
            what.split_once('/').unwrap_or((what, if what == "*" { "*" } else { "" }));
        Self {
            verb,
            resource: resource.to_owned(),
            subresource: subresource.to_owned(),
            object: words.next().map(str::to_owned),
        }
    }
}

impl Requests {
    fn matches(&self, request: &Request) -> bool {
        let any = |pattern: &str, value: &str| pattern == "*" || pattern == value;
        any(&self.verb, &request.verb)
            && any(&self.resource, &request.resource)
            && any(&self.subresource, &request.subresource)
            && self.object.as_ref().is_none_or(|object| {
                *object == request.name || *object == format!("{}/{}", request.namespace, request.name)
            })
    }
}

/// A request, as the server parsed it.
#[derive(Debug, Clone, Serialize)]
pub struct Request {
    /// get, list, watch, create, update, patch, delete, deletecollection.
    pub verb: String,
    /// Plural name.
    pub resource: String,
    /// Empty for the object itself.
    pub subresource: String,
    /// Empty for cluster scope.
    pub namespace: String,
    /// Empty for collections.
    pub name: String,
    /// Query of the URL, as it was sent.
    pub query: String,
    /// `User-Agent` header.
    pub user_agent: String,
    /// JSON body, null without one.
    pub body: Value,
}

impl Request {
    /// Returns the creation of an object without a namespace.
    pub(crate) fn creation() -> Self {
        let nothing = String::new;
        Self {
            verb: "create".to_owned(),
            resource: nothing(),
            subresource: nothing(),
            namespace: nothing(),
            name: nothing(),
            query: nothing(),
            user_agent: nothing(),
            body: Value::Null,
        }
    }
}

/// Failure of a request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Failure {
    /// 429 with `Retry-After` in seconds.
    TooManyRequests(u64),
    /// 500.
    Internal,
    /// 503.
    Unavailable,
    /// 409, as for a lost update.
    Conflict,
    /// 410.
    Gone,
    /// 401.
    Unauthorized,
    /// 403.
    Forbidden,
    /// 403 for the creation of an object in a namespace that is being terminated.
    NamespaceTerminating,
    /// 422.
    Invalid,
    /// A policy, a webhook or the API server declines the request with this code and message.
    Declined {
        /// HTTP status code.
        code: u16,
        /// Message of the `Status`.
        message: String,
    },
    /// The connection breaks before the request is executed.
    Disconnect,
    /// The request is executed, and the connection breaks before the response.
    LoseReply,
}

struct Rule {
    requests: Requests,
    failure: Failure,
    left: usize,
}

#[derive(Default)]
struct State {
    rules: Vec<Rule>,
    latencies: Vec<(Requests, Duration)>,
    blocks: Vec<Requests>,
    /// Earlier versions of objects, which reads from the cache return.
    lagging: Vec<Value>,
}

/// The faults of a server. They can be changed while the server runs.
pub struct Faults {
    state: Mutex<State>,
    /// Changes whenever blocked requests must check the faults again.
    changed: watch::Sender<u64>,
    /// Whether the server is down.
    down: watch::Sender<bool>,
    connections: Mutex<CancellationToken>,
    pub(crate) watches: watch::Sender<WatchCut>,
    /// Versions of resources that are not served, such as `certificates.k8s.io/v1/podcertificaterequests`.
    unserved: Mutex<BTreeSet<String>>,
    /// Fields that the server does not know: plural name of the resource, and JSON pointer.
    unknown_fields: Mutex<Vec<(String, String)>>,
}

/// The last disconnection, which all open watches observe.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct WatchCut {
    pub(crate) count: u64,
    pub(crate) expired: bool,
}

impl Default for Faults {
    fn default() -> Self {
        Self {
            state: Mutex::default(),
            changed: watch::channel(0).0,
            down: watch::channel(false).0,
            connections: Mutex::default(),
            watches: watch::channel(WatchCut::default()).0,
            unserved: Mutex::default(),
            unknown_fields: Mutex::default(),
        }
    }
}

impl Faults {
    /// Fails the next `times` matching requests.
    pub fn fail(&self, requests: impl Into<Requests>, times: usize, failure: Failure) {
        self.state.lock().rules.push(Rule { requests: requests.into(), failure, left: times });
    }

    /// Delays matching requests by `latency`.
    pub fn latency(&self, requests: impl Into<Requests>, latency: Duration) {
        self.state.lock().latencies.push((requests.into(), latency));
    }

    /// Blocks matching requests until [`Faults::clear`].
    pub fn block(&self, requests: impl Into<Requests>) {
        self.state.lock().blocks.push(requests.into());
    }

    /// Answers reads of an object from the cache (`resourceVersion=0`) with this earlier version of it, until
    /// [`Faults::clear`].
    pub fn lag(&self, earlier: Value) {
        self.state.lock().lagging.push(earlier);
    }

    /// Returns the version of an object that reads from the cache return, if it is not the newest one.
    pub(crate) fn cached(&self, newest: &Value) -> Option<Value> {
        let uid = &newest["metadata"]["uid"];
        self.state.lock().lagging.iter().find(|earlier| earlier["metadata"]["uid"] == *uid).cloned()
    }

    /// Ends all open watches without an error event.
    pub fn drop_watches(&self) {
        self.watches.send_modify(|cut| *cut = WatchCut { count: cut.count + 1, expired: false });
    }

    pub(crate) fn cut_watches_as_expired(&self) {
        self.watches.send_modify(|cut| *cut = WatchCut { count: cut.count + 1, expired: true });
    }

    /// Breaks all connections, and new ones until it is called with `false`.
    pub fn set_down(&self, down: bool) {
        self.down.send_replace(down);
        if down {
            let mut connections = self.connections.lock();
            connections.cancel();
            *connections = CancellationToken::new();
        }
    }

    /// Removes every fault, latency and block. Blocked requests continue.
    pub fn clear(&self) {
        *self.state.lock() = State::default();
        self.changed.send_modify(|n| *n += 1);
    }

    /// Replaces the versions of resources that are not served, as by an older or a newer API server. Their
    /// objects stay. A name may have a subresource, such as `storage.k8s.io/v1/csinodes/status`.
    pub fn set_unserved(&self, unserved: &[&str]) {
        *self.unserved.lock() = unserved.iter().map(|&name| name.to_owned()).collect();
    }

    pub(crate) fn serves(&self, group: &str, version: &str, plural: &str, subresource: &str) -> bool {
        let unserved = self.unserved.lock();
        let name = format!("{group}/{version}/{plural}");
        unserved.is_empty()
            || !unserved.contains(&format!("{name}/{subresource}")) && !unserved.contains(&name)
    }

    /// Replaces the fields that the server does not know, such as `pods /status/volumeHealth`. It accepts
    /// them and does not store them, as an older API server or one without a feature gate.
    pub fn set_unknown_fields(&self, fields: &[&str]) {
        let field =
            |field: &&str| field.split_once(' ').map(|(plural, at)| (plural.to_owned(), at.to_owned()));
        *self.unknown_fields.lock() = fields.iter().filter_map(field).collect();
    }

    /// Removes the fields that the server does not know from an object of a resource.
    pub(crate) fn drop_unknown_fields(&self, plural: &str, object: &mut Value) {
        for (_, pointer) in self.unknown_fields.lock().iter().filter(|(resource, _)| resource == plural) {
            let Some((parent, field)) = pointer.rsplit_once('/') else { continue };
            if let Some(fields) = object.pointer_mut(parent).and_then(Value::as_object_mut) {
                fields.remove(field);
            }
        }
    }

    pub(crate) fn is_down(&self) -> bool {
        *self.down.borrow()
    }

    pub(crate) fn connection(&self) -> CancellationToken {
        self.connections.lock().child_token()
    }

    /// Waits for latency and blocks, and returns the failure of this request, if any.
    pub(crate) async fn before(&self, request: &Request) -> Option<Failure> {
        let latency = {
            let state = self.state.lock();
            state.latencies.iter().filter(|(r, _)| r.matches(request)).map(|(_, d)| *d).max()
        };
        if let Some(latency) = latency {
            tokio::time::sleep(latency).await;
        }
        let mut changed = self.changed.subscribe();
        while self.state.lock().blocks.iter().any(|r| r.matches(request)) {
            if changed.changed().await.is_err() {
                break;
            }
        }
        let mut state = self.state.lock();
        let at = state.rules.iter().position(|rule| rule.left > 0 && rule.requests.matches(request))?;
        let rule = &mut state.rules[at];
        rule.left -= 1;
        let failure = rule.failure.clone();
        if rule.left == 0 {
            state.rules.remove(at);
        }
        Some(failure)
    }
}

/// Counts of requests per verb and resource since the start or the last reset.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Counts(BTreeMap<String, u64>);

impl Counts {
    /// Returns the number of matching requests, including failed ones.
    #[must_use]
    pub fn of(&self, requests: impl Into<Requests>) -> u64 {
        let requests = requests.into();
        let any = |pattern: &str, value: &str| pattern == "*" || pattern == value;
        self.0
            .iter()
            .filter(|(key, _)| {
                let (verb, what) = key.split_once(' ').unwrap_or((key, ""));
                let (resource, subresource) = what.split_once('/').unwrap_or((what, ""));
                any(&requests.verb, verb)
                    && any(&requests.resource, resource)
                    && any(&requests.subresource, subresource)
            })
            .map(|(_, n)| n)
            .sum()
    }

    /// Returns each `<verb> <resource>[/<subresource>]` with its count.
    pub fn iter(&self) -> impl Iterator<Item = (&str, u64)> {
        self.0.iter().map(|(key, n)| (key.as_str(), *n))
    }
}

/// Counters and log of received requests.
pub(crate) struct Traffic {
    counts: Mutex<Counts>,
    log: Mutex<VecDeque<Request>>,
    came: watch::Sender<u64>,
}

impl Default for Traffic {
    fn default() -> Self {
        Self { counts: Mutex::default(), log: Mutex::default(), came: watch::channel(0).0 }
    }
}

impl Traffic {
    pub(crate) fn record(&self, request: &Request) {
        let slash = if request.subresource.is_empty() { "" } else { "/" };
        let key = format!("{} {}{slash}{}", request.verb, request.resource, request.subresource);
        *self.counts.lock().0.entry(key).or_default() += 1;
        let mut log = self.log.lock();
        if log.len() == LOG_LIMIT {
            log.pop_front();
        }
        log.push_back(request.clone());
        drop(log);
        self.came.send_modify(|n| *n += 1);
    }

    /// Changes with every request.
    pub(crate) fn subscribe(&self) -> watch::Receiver<u64> {
        self.came.subscribe()
    }

    pub(crate) fn counts(&self) -> Counts {
        self.counts.lock().clone()
    }

    pub(crate) fn requests(&self, requests: &Requests) -> Vec<Request> {
        self.log.lock().iter().filter(|r| requests.matches(r)).cloned().collect()
    }

    pub(crate) fn reset(&self) {
        *self.counts.lock() = Counts::default();
        self.log.lock().clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_choose_requests() {
        let request = |verb: &str, resource: &str, sub: &str| Request {
            verb: verb.into(),
            resource: resource.into(),
            subresource: sub.into(),
            namespace: "default".into(),
            name: "web".into(),
            query: String::new(),
            user_agent: String::new(),
            body: Value::Null,
        };
        let cases = [
            ("patch pods/status", request("patch", "pods", "status"), true),
            ("patch pods", request("patch", "pods", "status"), false),
            ("patch pods/*", request("patch", "pods", "status"), true),
            ("* pods", request("get", "pods", ""), true),
            ("get *", request("get", "pods", "status"), true),
            ("*", request("get", "nodes", ""), true),
            ("get pods default/web", request("get", "pods", ""), true),
            ("get pods default/other", request("get", "pods", ""), false),
        ];
        for (pattern, request, want) in cases {
            assert_eq!(Requests::from(pattern).matches(&request), want, "{pattern} {request:?}");
        }
    }
}
