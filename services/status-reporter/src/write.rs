//! Writes one update to the API server.

use std::sync::Arc;

use quintlet_model::pod_status::shorten::{self, Part};
use serde::Deserialize;
use serde_json::Value;
use tracing::{debug, info};

use crate::api::{ApiClient, ApiFailure, pod_path};
use crate::status::patch::{self, Base};
use crate::status::{is_terminal, merge, phase};
use crate::update::{Update, UpdateOutcome};

/// Patches per attempt while they conflict.
const ROUNDS: usize = 3;

/// The last answer of the API server for a pod.
#[derive(Debug, Clone)]
pub(crate) struct Memory {
    api_uid: String,
    version: u64,
    status: Arc<Value>,
}

/// The parts of an answer that are kept.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Answer {
    metadata: AnswerMetadata,
    status: Value,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct AnswerMetadata {
    uid: String,
    resource_version: String,
}

impl Memory {
    fn of(pod: Answer) -> Self {
        Self {
            api_uid: pod.metadata.uid,
            version: pod.metadata.resource_version.parse().unwrap_or(0),
            status: Arc::new(pod.status),
        }
    }

    /// Returns the `resourceVersion` of the object.
    #[must_use]
    pub(crate) fn version(&self) -> u64 {
        self.version
    }

    /// Returns the status of the object.
    #[must_use]
    pub(crate) fn status(&self) -> &Value {
        &self.status
    }
}

/// The outcome of an attempt.
#[derive(Debug)]
pub(crate) enum AttemptOutcome {
    /// The update needs no further attempt.
    Done(UpdateOutcome),
    /// The attempt must be retried.
    Later(ApiFailure),
    /// The update was not written. It changes only the observed generation of a pod that is being deleted,
    /// and may be written together with the next one.
    Deferred,
}

/// The largest statuses of one pod that the API server takes.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Room {
    /// Bytes of the smallest status that was too large, as JSON; none if no status was.
    too_large: Option<usize>,
    /// A status without any part that can be left out was too large.
    is_least_refused: bool,
}

impl Room {
    /// Shortens a status to less than was refused. Returns the last part that was left out.
    fn fit(self, status: &mut Value) -> Option<Part> {
        shorten::shorten_to(status, self.too_large?.saturating_sub(1))
    }

    /// Records a status that was too large. Returns whether it can be shorter.
    fn refuse(&mut self, status: &Value) -> bool {
        let bytes = shorten::size(status);
        self.too_large = Some(self.too_large.map_or(bytes, |known| known.min(bytes)));
        let mut shorter = status.clone();
        self.fit(&mut shorter).is_some()
    }

    /// Records that a status was too large from which no part can be left out. Returns whether an earlier
    /// attempt had that answer, too.
    fn refuse_least(&mut self) -> bool {
        std::mem::replace(&mut self.is_least_refused, true)
    }

    /// Records a status that was written: the object may have become smaller since an earlier refusal.
    fn accept(&mut self, status: &Value) {
        self.is_least_refused = false;
        if self.too_large.is_some_and(|refused| shorten::size(status) >= refused) {
            self.too_large = None;
        }
    }
}

/// Writes an update. Reads and updates `memory` and `room`, also if the attempt fails.
///
/// Most updates need one PATCH. The live object is read only after a conflict. With `may_defer`, an update
/// that can wait for the next one is not written. A status that is too large for the API server is shortened.
/// A finished pod of which the API server has refused the least status twice is deleted without one.
pub(crate) async fn write(
    api: &ApiClient,
    update: &Update,
    memory: &mut Option<Memory>,
    room: &mut Room,
    may_defer: bool,
    now: &str,
) -> AttemptOutcome {
    if update.api_uid.is_empty() {
        // A static pod without a mirror pod has no object.
        return AttemptOutcome::Done(UpdateOutcome::Gone);
    }
    if memory.as_ref().is_some_and(|m| m.api_uid != update.api_uid) {
        *memory = None;
    }
    let (mut base, mut version, mut trust) = match memory.as_ref() {
        Some(own) if own.version >= update.base_version => {
            (Arc::clone(&own.status), own.version, Base::Known)
        }
        Some(_) => (Arc::clone(&update.base), update.base_version, Base::Known),
        None => (Arc::clone(&update.base), update.base_version, Base::Claimed),
    };
    let path = pod_path(&update.namespace, &update.name);
    let mut last = None;
    // The difference from a claimed base may be smaller than that from the object.
    let may_defer = may_defer && update.deleting && !update.finished && trust == Base::Known;
    let mut rounds = 1..ROUNDS;
    loop {
        let mut merged = merge::merge(&base, &update.desired, update.could_run, now);
        let without = room.fit(&mut merged);
        let Some(patch) = patch::pod_status(&update.api_uid, &base, &merged, trust) else {
            return finish(api, update, &path, phase(&merged), written(version, without)).await;
        };
        if may_defer && last.is_none() && patch::is_of_generation_alone(&base, &merged) {
            return AttemptOutcome::Deferred;
        }
        let failure = match api.patch_as(&format!("{path}/status"), &patch).await {
            Ok(pod) => {
                room.accept(&merged);
                let answer = memory.insert(Memory::of(pod));
                let (phase, version) = (phase(&answer.status).to_owned(), answer.version);
                return finish(api, update, &path, &phase, written(version, without)).await;
            }
            Err(failure) => failure,
        };
        match failure {
            // Each time the status has fewer bytes, until it has no part left that can be left out.
            ApiFailure::TooLarge(_) if room.refuse(&merged) => {
                debug!(pod.uid = %update.uid, %failure, "status is too large, shortening it");
                continue;
            }
            // The first such answer may be that of a proxy or a webhook, which changes.
            ApiFailure::TooLarge(_) if room.refuse_least() && is_removable(update, phase(&merged)) => {
                info!(pod.uid = %update.uid, %failure, "no status of the finished pod can be written");
                return remove(api, update, &path).await;
            }
            ApiFailure::NotFound(_) => return AttemptOutcome::Done(UpdateOutcome::Gone),
            // The patch may be invalid for the live object alone, such as a phase that is no longer allowed.
            ApiFailure::Invalid(_) if last.is_none() => {}
            ApiFailure::Conflict(_) => {}
            failure => return AttemptOutcome::Later(failure),
        }
        debug!(pod.uid = %update.uid, %failure, "patch failed, reading live object");
        last = Some(failure);
        let live = match api.get_as(&path).await {
            Ok(live) => live,
            Err(ApiFailure::NotFound(_)) => return AttemptOutcome::Done(UpdateOutcome::Gone),
            Err(failure) => return AttemptOutcome::Later(failure),
        };
        let live = Memory::of(live);
        if live.api_uid != update.api_uid {
            return AttemptOutcome::Done(UpdateOutcome::UidMismatch(live.api_uid));
        }
        (base, version, trust) = (Arc::clone(&live.status), live.version, Base::Known);
        *memory = Some(live);
        if rounds.next().is_none() {
            let changing = || ApiFailure::Conflict("the object keeps changing".to_owned());
            return AttemptOutcome::Later(last.unwrap_or_else(changing));
        }
    }
}

fn written(version: u64, without: Option<Part>) -> UpdateOutcome {
    let version = version.to_string();
    match without {
        None => UpdateOutcome::Written(version),
        Some(without) => UpdateOutcome::Shortened { version, without },
    }
}

fn is_removable(update: &Update, phase: &str) -> bool {
    update.finished && update.deleting && !update.mirror && is_terminal(phase)
}

/// Deletes the object if the pod has finished.
async fn finish(
    api: &ApiClient,
    update: &Update,
    path: &str,
    phase: &str,
    written: UpdateOutcome,
) -> AttemptOutcome {
    if is_removable(update, phase) { remove(api, update, path).await } else { AttemptOutcome::Done(written) }
}

async fn remove(api: &ApiClient, update: &Update, path: &str) -> AttemptOutcome {
    match api.delete_now(path, &update.api_uid).await {
        Ok(()) | Err(ApiFailure::NotFound(_)) => AttemptOutcome::Done(UpdateOutcome::Deleted),
        Err(ApiFailure::Conflict(why)) => AttemptOutcome::Done(UpdateOutcome::UidMismatch(why)),
        // A policy or a webhook that refuses the call now may allow it later.
        Err(failure) => AttemptOutcome::Later(failure),
    }
}
