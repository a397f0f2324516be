//! The script of the driver, and a record of its calls.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use parking_lot::Mutex;
use quintlet_plugin_api::dra::v1 as api;
use quintlet_plugin_api::dra_health::v1 as health;
use tokio::sync::watch;
use tonic::{Code, Status};

/// A method of the driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Method {
    /// Prepares the devices of claims before their pod starts.
    NodePrepareResources,
    /// Releases the devices of claims after their pods have ended.
    NodeUnprepareResources,
    /// A stream of the health of devices.
    NodeWatchResources,
    /// Name, endpoint and services for the registration.
    GetInfo,
    /// Result of the registration.
    NotifyRegistrationStatus,
}

/// A fault of a method, until another one is set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fault {
    /// The call never returns.
    Hang,
    /// The call waits until the fault is ended.
    Wait,
    /// The call fails with this code.
    Fail(Code),
    /// The claim with this name fails.
    FailClaim(String),
    /// The response has no entry for the claim with this name.
    Skip(String),
    /// The response has an entry for this UID, too.
    Add(String),
}

/// The script of the driver, and a record of its calls.
#[derive(Debug, Default)]
pub(crate) struct DriverState {
    pub(crate) name: Mutex<String>,
    pub(crate) endpoint: Mutex<String>,
    pub(crate) services: Mutex<Vec<String>>,
    pub(crate) faults: watch::Sender<BTreeMap<Method, Fault>>,
    // By name of the claim.
    pub(crate) devices: Mutex<BTreeMap<String, Vec<api::Device>>>,
    pub(crate) without_cdi: Mutex<bool>,
    // Where prepared claims have a CDI file.
    pub(crate) cdi_dir: Mutex<Option<PathBuf>>,
    pub(crate) calls: Mutex<Vec<String>>,
    // UIDs of claims.
    pub(crate) prepared: Mutex<BTreeSet<String>>,
    pub(crate) in_call: Mutex<BTreeSet<String>>,
    // Claims that were in two calls at the same time.
    pub(crate) overlaps: Mutex<Vec<String>>,
    pub(crate) informed: Mutex<Vec<Result<(), String>>>,
    // Calls of the registration.
    pub(crate) registration_calls: Mutex<Vec<Method>>,
    pub(crate) health: watch::Sender<Vec<health::DeviceHealth>>,
    pub(crate) health_ends: watch::Sender<u64>,
    // Number of accepted connections.
    pub(crate) connections: Mutex<usize>,
}

/// Marks claims as being in a call, until it is dropped.
pub(crate) struct InCall<'a> {
    state: &'a DriverState,
    uids: Vec<String>,
}

impl Drop for InCall<'_> {
    fn drop(&mut self) {
        let mut in_call = self.state.in_call.lock();
        self.uids.iter().for_each(|uid| {
            in_call.remove(uid);
        });
    }
}

impl DriverState {
    fn begin(&self, claims: &[api::Claim]) -> InCall<'_> {
        let mut in_call = self.in_call.lock();
        let mut uids = Vec::new();
        for claim in claims {
            if in_call.insert(claim.uid.clone()) {
                uids.push(claim.uid.clone());
            } else {
                self.overlaps.lock().push(claim.name.clone());
            }
        }
        InCall { state: self, uids }
    }

    fn fault(&self, method: Method) -> Option<Fault> {
        self.faults.borrow().get(&method).cloned()
    }

    /// Records a call, and waits or fails as the fault of the method says.
    pub(crate) async fn called(
        &self,
        version: &str,
        method: Method,
        claims: &[api::Claim],
    ) -> Result<InCall<'_>, Status> {
        let names: Vec<_> = claims.iter().map(|claim| claim.name.as_str()).collect();
        let call = format!("{version} {method:?} {}", names.join(" ")).trim_end().to_owned();
        self.calls.lock().push(call);
        let in_call = self.begin(claims);
        self.apply_fault(method).await?;
        Ok(in_call)
    }

    /// Records a call of the registration, and waits or fails as the fault of the method says.
    pub(crate) async fn registering(&self, method: Method) -> Result<(), Status> {
        self.registration_calls.lock().push(method);
        self.apply_fault(method).await
    }

    async fn apply_fault(&self, method: Method) -> Result<(), Status> {
        match self.fault(method) {
            Some(Fault::Hang) => std::future::pending().await,
            Some(Fault::Fail(code)) => return Err(Status::new(code, format!("{method:?} fails"))),
            Some(Fault::Wait) => {
                let mut faults = self.faults.subscribe();
                // The sender is in `self`.
                let _ = faults.wait_for(|faults| faults.get(&method) != Some(&Fault::Wait)).await;
            }
            Some(Fault::FailClaim(_) | Fault::Skip(_) | Fault::Add(_)) | None => {}
        }
        Ok(())
    }

    /// Prepares claims. Returns the results by UID.
    pub(crate) fn prepare(
        &self,
        claims: &[api::Claim],
    ) -> BTreeMap<String, api::NodePrepareResourceResponse> {
        let driver = self.name.lock().clone();
        let mut results = BTreeMap::new();
        for claim in claims {
            match self.fault(Method::NodePrepareResources) {
                Some(Fault::Skip(name)) if name == claim.name => continue,
                Some(Fault::FailClaim(name)) if name == claim.name => {
                    let error = "on fire".to_owned();
                    let answer = api::NodePrepareResourceResponse { devices: Vec::new(), error };
                    results.insert(claim.uid.clone(), answer);
                    continue;
                }
                _ => {}
            }
            self.prepared.lock().insert(claim.uid.clone());
            let scripted = self.devices.lock().get(&claim.name).cloned();
            let mut devices = scripted.unwrap_or_else(|| vec![device(&driver, &claim.name)]);
            if let Some(dir) = self.cdi_dir.lock().as_deref() {
                describe(dir, &driver, claim);
            }
            if *self.without_cdi.lock() {
                devices.iter_mut().for_each(|device| device.cdi_device_ids.clear());
            }
            let answer = api::NodePrepareResourceResponse { devices, error: String::new() };
            results.insert(claim.uid.clone(), answer);
        }
        if let Some(Fault::Add(uid)) = self.fault(Method::NodePrepareResources) {
            results.insert(uid, api::NodePrepareResourceResponse::default());
        }
        results
    }

    /// Unprepares claims. Returns the errors by UID; those of success are empty.
    pub(crate) fn unprepare(&self, claims: &[api::Claim]) -> BTreeMap<String, String> {
        let mut results = BTreeMap::new();
        for claim in claims {
            match self.fault(Method::NodeUnprepareResources) {
                Some(Fault::Skip(name)) if name == claim.name => continue,
                Some(Fault::FailClaim(name)) if name == claim.name => {
                    results.insert(claim.uid.clone(), "on fire".to_owned());
                    continue;
                }
                _ => {}
            }
            self.prepared.lock().remove(&claim.uid);
            if let Some(dir) = self.cdi_dir.lock().as_deref() {
                // A claim may be unprepared more than once.
                let _ = std::fs::remove_file(cdi_file(dir, claim));
            }
            results.insert(claim.uid.clone(), String::new());
        }
        if let Some(Fault::Add(uid)) = self.fault(Method::NodeUnprepareResources) {
            results.insert(uid, String::new());
        }
        results
    }
}

/// Returns the device that the driver prepares for a claim.
fn device(driver: &str, claim: &str) -> api::Device {
    api::Device {
        request_names: Vec::new(),
        pool_name: "pool".to_owned(),
        device_name: claim.to_owned(),
        cdi_device_ids: vec![format!("{driver}/claim={claim}")],
        share_id: None,
    }
}

fn cdi_file(dir: &Path, claim: &api::Claim) -> PathBuf {
    dir.join(format!("{}.json", claim.uid))
}

/// Writes the CDI file of the device that the driver prepares for a claim.
fn describe(dir: &Path, driver: &str, claim: &api::Claim) {
    let spec = serde_json::json!({
        "cdiVersion": "0.5.0",
        "kind": format!("{driver}/claim"),
        "devices": [{"name": claim.name, "containerEdits": {"env": [format!("CDI_CLAIM={}", claim.name)]}}],
    });
    std::fs::create_dir_all(dir).expect("the directory of CDI files can be made");
    std::fs::write(cdi_file(dir, claim), spec.to_string()).expect("the CDI file can be written");
}
