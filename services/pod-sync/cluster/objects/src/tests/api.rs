//! An API server in memory, behind a [`kube::Client`] without sockets, so that tests run in paused time.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use bytes::Bytes;
use http::{Request, Response, StatusCode, Uri};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt as _, Full, StreamBody};
use kube::client::Body;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::mpsc;

type Answer = Response<UnsyncBoxBody<Bytes, std::io::Error>>;
type Chunk = Result<http_body::Frame<Bytes>, std::io::Error>;

/// How requests fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    /// The connection is refused.
    Refused,
    /// There is no response.
    Silent,
    /// Status 403.
    Forbidden,
    /// Watches end at once.
    ShortWatches,
}

#[derive(Default)]
struct State {
    version: u64,
    // By `<plural>/<name>`; all are in namespace `default`.
    objects: BTreeMap<String, Value>,
    history: Vec<(u64, String, &'static str, Value)>,
    // The oldest version that a watch can begin at.
    oldest: u64,
    requests: BTreeMap<String, usize>,
    watches: Vec<(String, mpsc::UnboundedSender<Chunk>)>,
    faults: BTreeMap<String, Fault>,
    // Forbidden requests before others are served.
    refusals: usize,
}

#[derive(Clone, Default)]
pub(super) struct FakeApi(Arc<Mutex<State>>);

fn line(kind: &str, object: &Value) -> Chunk {
    Ok(http_body::Frame::data(Bytes::from(format!("{}\n", json!({"type": kind, "object": object})))))
}

fn failure(code: u16, reason: &str, message: &str) -> Value {
    json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "code": code, "reason": reason, "message": message})
}

impl FakeApi {
    pub(super) fn client(&self) -> kube::Client {
        let api = self.clone();
        kube::Client::new(
            tower::service_fn(move |request: Request<Body>| {
                let (api, uri) = (api.clone(), request.uri().clone());
                async move { api.respond(&uri).await }
            }),
            "default",
        )
    }

    async fn respond(&self, uri: &Uri) -> Result<Answer, std::io::Error> {
        let path: Vec<&str> = uri.path().trim_start_matches('/').split('/').collect();
        let query = uri.query().unwrap_or_default().replace("%3D", "=");
        let parameter = |name: &str| {
            query.split('&').find_map(|part| part.strip_prefix(&format!("{name}="))).unwrap_or_default()
        };
        let (verb, name) = match path.get(5) {
            Some(name) => ("get", (*name).to_owned()),
            None => {
                let name = parameter("fieldSelector").strip_prefix("metadata.name=").expect("a selector");
                (if parameter("watch") == "true" { "watch" } else { "list" }, name.to_owned())
            }
        };
        assert_eq!(path[3], "default", "the namespace");
        let key = format!("{}/{name}", path[4]);
        let fault = {
            let mut state = self.0.lock();
            *state.requests.entry(format!("{verb} {key}")).or_default() += 1;
            if state.refusals > 0 {
                state.refusals -= 1;
                Some(Fault::Forbidden)
            } else {
                state.faults.get(&key).or_else(|| state.faults.get("*")).copied()
            }
        };
        match fault {
            Some(Fault::Refused) => {
                return Err(std::io::Error::new(std::io::ErrorKind::ConnectionRefused, "refused"));
            }
            Some(Fault::Silent) => std::future::pending().await,
            Some(Fault::Forbidden) => {
                return Ok(answer(403, &failure(403, "Forbidden", &format!("{key} is forbidden"))));
            }
            Some(Fault::ShortWatches) | None => {}
        }
        let mut state = self.0.lock();
        let found = state.objects.get(&key).cloned();
        match verb {
            "get" => Ok(found.map_or_else(
                || answer(404, &failure(404, "NotFound", &format!("{key} not found"))),
                |object| answer(200, &object),
            )),
            "list" => Ok(answer(
                200,
                &json!({"kind": "List", "apiVersion": "v1", "items": found.into_iter().collect::<Vec<_>>(),
                    "metadata": {"resourceVersion": state.version.to_string()}}),
            )),
            _ => {
                let since: u64 = parameter("resourceVersion").parse().expect("a version");
                if since < state.oldest {
                    return Ok(answer(410, &failure(410, "Expired", "too old resource version")));
                }
                #[expect(clippy::disallowed_methods, reason = "of a test")]
                let (sender, receiver) = mpsc::unbounded_channel();
                for (version, changed, kind, object) in &state.history {
                    if *version > since && *changed == key {
                        sender.send(line(kind, object)).expect("the receiver is here");
                    }
                }
                if fault != Some(Fault::ShortWatches) {
                    state.watches.push((key, sender));
                }
                let stream = futures::stream::unfold(receiver, |mut receiver| async move {
                    receiver.recv().await.map(|chunk| (chunk, receiver))
                });
                Ok(Response::new(StreamBody::new(stream).boxed_unsync()))
            }
        }
    }

    fn change(&self, key: &str, kind: &'static str, object: Option<Value>) {
        let mut state = self.0.lock();
        state.version += 1;
        let version = state.version;
        let mut object = match (object, kind) {
            (Some(object), _) => object,
            (None, _) => state.objects[key].clone(),
        };
        object["metadata"]["resourceVersion"] = json!(version.to_string());
        match kind {
            "DELETED" => drop(state.objects.remove(key)),
            _ => drop(state.objects.insert(key.to_owned(), object.clone())),
        }
        state.history.push((version, key.to_owned(), kind, object.clone()));
        state.watches.retain(|(watched, watch)| watched != key || watch.send(line(kind, &object)).is_ok());
    }

    /// Creates or updates a ConfigMap or Secret. A created object gets another UID than the one before.
    pub(super) fn put(&self, key: &str, value: &str, is_immutable: bool) {
        let (plural, name) = key.split_once('/').expect("a plural and a name");
        let data = if plural == "secrets" { "stringData" } else { "data" };
        let (known, version) = {
            let state = self.0.lock();
            (state.objects.get(key).cloned(), state.version)
        };
        let uid =
            known.as_ref().map_or_else(|| json!(format!("u{version}")), |o| o["metadata"]["uid"].clone());
        let object = json!({
            "metadata": {"name": name, "namespace": "default", "uid": uid,
                "managedFields": [{"manager": "test", "operation": "Update"}]},
            data: {"k": value}, "immutable": is_immutable,
        });
        self.change(key, if known.is_some() { "MODIFIED" } else { "ADDED" }, Some(object));
    }

    pub(super) fn delete(&self, key: &str) {
        self.change(key, "DELETED", None);
    }

    pub(super) fn exists(&self, key: &str) -> bool {
        self.0.lock().objects.contains_key(key)
    }

    /// Makes requests for an object fail; `*` stands for all objects.
    pub(super) fn fail(&self, key: &str, fault: Fault) {
        self.0.lock().faults.insert(key.to_owned(), fault);
    }

    /// Refuses the next requests.
    pub(super) fn refuse(&self, requests: usize) {
        self.0.lock().refusals = requests;
    }

    pub(super) fn heal(&self) {
        self.0.lock().faults.clear();
    }

    /// Ends all watches without an error, as the API server does after their timeout.
    pub(super) fn close_watches(&self) {
        self.0.lock().watches.clear();
    }

    /// Breaks the connections of all watches.
    pub(super) fn break_watches(&self) {
        for (_, watch) in self.0.lock().watches.drain(..) {
            let error = std::io::Error::new(std::io::ErrorKind::ConnectionReset, "reset");
            // The receiver may have been dropped; that is not an error.
            let _ = watch.send(Err(error));
        }
    }

    /// Forgets the history: watches begin at the current version or fail with 410.
    pub(super) fn compact(&self) {
        let mut state = self.0.lock();
        state.oldest = state.version;
        state.history.clear();
    }

    /// Sends the error 410 to all watches.
    pub(super) fn expire_watches(&self) {
        self.compact();
        let gone = failure(410, "Expired", "too old resource version");
        for (_, watch) in self.0.lock().watches.drain(..) {
            // The receiver may have been dropped; that is not an error.
            let _ = watch.send(line("ERROR", &gone));
        }
    }

    /// Returns the number of requests so far, e.g. of `list configmaps/a`.
    pub(super) fn requests(&self, which: &str) -> usize {
        self.0.lock().requests.get(which).copied().unwrap_or_default()
    }

    pub(super) fn all_requests(&self) -> usize {
        self.0.lock().requests.values().sum()
    }

    /// Returns the objects with an open watch, and fails if one has two.
    pub(super) fn watched(&self) -> BTreeSet<String> {
        let state = self.0.lock();
        let mut all = BTreeSet::new();
        for (key, watch) in &state.watches {
            assert!(watch.is_closed() || all.insert(key.clone()), "two watches of {key}");
        }
        all
    }
}

fn answer(code: u16, body: &Value) -> Answer {
    let body = Full::new(Bytes::from(body.to_string())).map_err(|never| match never {});
    let mut response = Response::new(body.boxed_unsync());
    *response.status_mut() = StatusCode::from_u16(code).expect("a status");
    response
}
