//! Thresholds, observations and pods for tests.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use quintlet_model::ids::PodUid;
use quintlet_model::quantity::{Format, Quantity};
use serde_json::{Value, json};

use crate::signal::Signal;
use crate::thresholds::{Amount, Threshold};
use crate::usage::{Candidate, Observation, Observations};

pub(crate) const MIB: i64 = 1 << 20;

pub(crate) fn bytes(count: i64) -> Amount {
    Amount::Quantity(Quantity::from_units(count, Format::Binary))
}

pub(crate) fn hard(signal: Signal, below: i64) -> Threshold {
    Threshold { signal, value: bytes(below), grace: Duration::ZERO, minimum_reclaim: None }
}

pub(crate) fn soft(signal: Signal, below: i64, grace: Duration) -> Threshold {
    Threshold { grace, ..hard(signal, below) }
}

pub(crate) fn free(signal: Signal, available: i64, capacity: i64, at: Duration) -> Observations {
    let observation = Observation::new(signal, available, capacity, at).unwrap();
    [(signal, observation)].into()
}

/// A pod with one container `c`. `spec` is merged into its spec.
pub(crate) fn pod(name: &str, spec: Value) -> Pod {
    let mut whole = json!({ "containers": [{ "name": "c" }] });
    whole.as_object_mut().unwrap().extend(spec.as_object().unwrap().clone());
    let metadata = json!({ "name": name, "namespace": "default", "uid": name });
    serde_json::from_value(json!({ "metadata": metadata, "spec": whole })).unwrap()
}

pub(crate) fn candidate(name: &str, spec: Value) -> Candidate {
    Candidate { uid: PodUid::parse(name).unwrap(), pod: Arc::new(pod(name, spec)) }
}
