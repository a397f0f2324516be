//! Prepares and unprepares claims: records first, then calls the drivers, then records what they answered.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use quintlet_kit::{clock, failpoint, task};
use quintlet_model::ids::PodUid;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::checkpoint::encode;
use crate::claim::{AllocatedClaim, ClaimKey};
use crate::driver::{CALL_LIMIT, DriverPlugin};
use crate::error::{ClaimError, DriverMethod};
use crate::inventory::{Batches, ClaimCall, ClaimInventory, OperationStart};
use crate::operation::{DriverResults, evaluate, failed};
use crate::requests::{NeededClaim, allocated_claim, needed_claims};
use crate::shared::{ManagerState, Shared};

/// Longest wait until no other operation on a claim is in progress: two calls.
const BUSY_LIMIT: Duration = CALL_LIMIT.saturating_mul(2);

/// A pod that may run without a record.
#[derive(Debug)]
pub(crate) struct ClaimUser {
    uid: String,
    keys: Vec<ClaimKey>,
}

/// Returns the users of claims among pods.
pub(crate) fn users(pods: &[Arc<Pod>]) -> Vec<ClaimUser> {
    let user = |pod: &Arc<Pod>| {
        let keys = claim_keys(pod).ok().filter(|keys| !keys.is_empty())?;
        Some(ClaimUser { uid: pod.metadata.uid.clone()?, keys })
    };
    pods.iter().filter_map(user).collect()
}

/// Returns the claims that a pod needs.
pub(crate) fn claim_keys(pod: &Pod) -> Result<Vec<ClaimKey>, ClaimError> {
    let namespace = pod.metadata.namespace.clone().unwrap_or_default();
    let key = |claim: NeededClaim| ClaimKey { namespace: namespace.clone(), name: claim.name };
    Ok(needed_claims(pod)?.into_iter().map(key).collect())
}

impl Shared {
    pub(crate) async fn measured<T>(
        &self,
        operation: &'static str,
        work: impl Future<Output = Result<T, ClaimError>>,
    ) -> Result<T, ClaimError> {
        let began = self.clock.boot();
        let result = work.await;
        self.metrics.operated(operation, result.is_err(), self.clock.boot().saturating_sub(began));
        result
    }

    pub(crate) async fn prepare(
        self: &Arc<Self>,
        uid: &PodUid,
        pod: &Pod,
        gone: &CancellationToken,
    ) -> Result<(), ClaimError> {
        let claims = self.allocated_claims(pod).await?;
        let batches = self
            .begin(|state| {
                // Without its record the pod has no claims to unprepare, so that it may have ended.
                if gone.is_cancelled() {
                    return Err(ClaimError::Ending);
                }
                for driver in claims.iter().flat_map(AllocatedClaim::drivers) {
                    state.plugin(driver)?;
                }
                state.inventory.begin_prepare(uid.as_str(), &claims)
            })
            .await?;
        failpoint::work!("claims recorded");
        if let Err(error) = self.persist().await {
            self.finish(|inventory| inventory.finish_prepare(&claims, false));
            return Err(error);
        }
        let results = self.call_all(DriverMethod::Prepare, batches).await;
        failpoint::work!("claims prepared");
        let error = results.iter().find_map(|(_, results)| results.error.clone());
        self.finish(|inventory| {
            for (driver, results) in results {
                for (key, devices) in results.done {
                    inventory.set_devices(&key, &driver, devices);
                }
            }
            inventory.finish_prepare(&claims, error.is_none());
        });
        self.persist().await?;
        error.map_or(Ok(()), Err)
    }

    /// Reads the claims of a pod, and checks that the pod may use them.
    async fn allocated_claims(&self, pod: &Pod) -> Result<Vec<AllocatedClaim>, ClaimError> {
        let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
        let mut claims = Vec::new();
        for needed in needed_claims(pod)? {
            let claim = self.source.get(namespace, &needed.name).await;
            let claim = claim.map_err(|error| ClaimError::Fetch {
                name: needed.name.clone(),
                reason: error.to_string(),
            })?;
            claims.push(allocated_claim(pod, &needed, &claim)?);
        }
        Ok(claims)
    }

    pub(crate) async fn unprepare(
        self: &Arc<Self>,
        pod: &str,
        users: &[ClaimUser],
    ) -> Result<(), ClaimError> {
        let batches = self
            .begin(|state| {
                for user in users.iter().filter(|user| user.uid != pod) {
                    state.inventory.share(&user.uid, &user.keys);
                }
                Ok(state.inventory.begin_unprepare(pod))
            })
            .await?;
        failpoint::work!("claims released");
        let results = self.call_all(DriverMethod::Unprepare, batches).await;
        failpoint::work!("claims unprepared");
        let error = results.iter().find_map(|(_, results)| results.error.clone());
        let failed: BTreeSet<ClaimKey> =
            results.into_iter().flat_map(|(_, results)| results.failed).collect();
        self.finish(|inventory| inventory.finish_unprepare(pod, &failed));
        self.persist().await?;
        match error {
            // All claims are unprepared, and the driver named another one.
            Some(error) if failed.is_empty() => {
                tracing::warn!(pod, %error, "DRA driver returned a result for an unknown claim");
                Ok(())
            }
            Some(error) => Err(error),
            None => Ok(()),
        }
    }

    /// Begins an operation, once none is in progress on its claims.
    pub(crate) async fn begin(
        &self,
        mut begin: impl FnMut(&mut ManagerState) -> Result<OperationStart, ClaimError>,
    ) -> Result<Batches, ClaimError> {
        let deadline = clock::deadline_after(Instant::now(), BUSY_LIMIT);
        loop {
            let idle = self.idle.notified();
            let busy = {
                let mut state = self.state.lock();
                match begin(&mut state)? {
                    OperationStart::Begun(batches) => {
                        state.is_unwritten = true;
                        drop(state);
                        self.operations.send_replace(());
                        return Ok(batches);
                    }
                    OperationStart::Busy(key) => key,
                }
            };
            if tokio::time::timeout_at(deadline, idle).await.is_err() {
                return Err(ClaimError::Busy(busy.name));
            }
        }
    }

    fn finish(&self, finish: impl FnOnce(&mut ClaimInventory)) {
        {
            let mut state = self.state.lock();
            finish(&mut state.inventory);
            state.is_unwritten = true;
            self.metrics.show_in_use(state.inventory.in_use());
        }
        self.idle.notify_waiters();
        self.operations.send_replace(());
    }

    /// Calls all drivers at the same time. Returns the results in the order of their names.
    async fn call_all(
        self: &Arc<Self>,
        method: DriverMethod,
        batches: Batches,
    ) -> Vec<(String, DriverResults)> {
        let mut calls = Vec::new();
        for (driver, claims) in batches {
            let plugin = self.state.lock().plugin(&driver);
            let shared = Arc::clone(self);
            let call = match plugin {
                Ok(plugin) => {
                    Ok(task::spawn("dra-call", async move { shared.call(&plugin, method, claims).await }))
                }
                Err(error) => Err(failed(&claims, error)),
            };
            calls.push((driver, call));
        }
        let mut all = Vec::new();
        for (driver, call) in calls {
            let results = match call {
                // A panic ends the process.
                Ok(call) => call.await.unwrap_or_default(),
                Err(results) => results,
            };
            all.push((driver, results));
        }
        all
    }

    async fn call(
        &self,
        plugin: &DriverPlugin,
        method: DriverMethod,
        claims: Vec<ClaimCall>,
    ) -> DriverResults {
        let began = self.clock.boot();
        let answer = plugin.call(method, &claims).await;
        let took = self.clock.boot().saturating_sub(began);
        let code = answer.as_ref().map_or_else(|error| error.code_name(), |_| "OK");
        self.metrics.called(&plugin.driver, plugin.method_name(method), code, took);
        let results = evaluate(method, &claims, answer);
        let mut state = self.state.lock();
        match &results.error {
            Some(error) => {
                tracing::warn!(driver = plugin.driver, %error, "call of DRA driver failed");
                state.errors.insert(plugin.driver.clone(), error.to_string());
            }
            None => {
                state.errors.remove(&plugin.driver);
            }
        }
        results
    }

    /// Writes the checkpoint, if it has changed.
    async fn persist(&self) -> Result<(), ClaimError> {
        let records = || {
            let mut state = self.state.lock();
            state.is_unwritten = false;
            Ok(state.inventory.records())
        };
        let written = self.file.write_state(records, |file, records| {
            let bytes = encode(&records).map_err(std::io::Error::other)?;
            if file.has(&bytes) {
                return Ok(());
            }
            failpoint::file!("claim checkpoint written", || file.write(bytes))
        });
        written.await.map_err(|error| {
            self.state.lock().is_unwritten = true;
            ClaimError::Checkpoint(error.to_string())
        })
    }
}
