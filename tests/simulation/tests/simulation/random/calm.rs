//! Sequences in which faults end, and the node stays calm for a part of the time. Their pods stop slowly, or
//! have an image volume or a volume of a CSI driver.

use std::collections::BTreeSet;
use std::time::Duration;

use proptest::prelude::*;
use quintlet_csi_driver::fault::{self, Fault};
use quintlet_csi_driver::thread::DriverThread;
use quintlet_csi_driver::volumes;
use quintlet_simulation::rules::{Rules, probe};
use quintlet_simulation::{Seen, Sim};
use quintlet_testkit::fake_runtime::{Behaviour, StopReply};
use serde_json::{Value, json};

use super::super::claims::{INTERNAL, bound_claim, csi_driver, mount_of, start_driver};
use super::{Action, PROBED, PROBES, Policy, may_become, name, settle_within, uid};

/// A pod whose containers stop slowly.
pub(super) const SLOW: usize = 4;
/// A pod with an image volume.
const IMAGE: usize = 5;
/// A pod with a volume that is published again and again.
pub(super) const CSI: usize = 6;
/// Time that the containers of [`SLOW`] take to stop.
const STOP: Duration = Duration::from_secs(15);
/// Time in which the readiness probe of a pod that was deleted fails at least, if no other action follows.
const UNREADY: Duration = Duration::from_secs(6);
/// Limit of the time until all pods are as they should be: a planted bug may make each step of a pod slow,
/// and is to be found by what holds from then on.
const REST: Duration = Duration::from_secs(300);
const CLAIM: &str = "data";

pub(super) fn action() -> impl Strategy<Value = Action> {
    let pod = || prop::sample::select(vec![1, SLOW, IMAGE, CSI]);
    let probed = prop::sample::select(vec![1, SLOW]);
    prop_oneof![
        8 => super::action(),
        5 => pod().prop_map(|p| Action::Create(p, Policy::Always)),
        3 => Just(Action::Rest),
        4 => (pod(), 1..20i64).prop_map(|(p, grace)| Action::Delete(p, grace)),
        3 => (probed, any::<bool>()).prop_map(|(p, fails)| Action::Probe("readiness", p, fails)),
        2 => (500..3_000u64).prop_map(Action::RefusePublish),
        2 => (5..20i64).prop_map(Action::DeleteUnready),
        4 => (3_000..12_000u64).prop_map(Action::Pause),
    ]
}

impl Action {
    /// Returns whether a calm node stays calm.
    fn is_calm(&self) -> bool {
        match self {
            Self::Create(..)
            | Self::Label(..)
            | Self::Image(..)
            | Self::Delete(..)
            | Self::Exit(..)
            | Self::Probe(..)
            | Self::TooLarge
            | Self::Manifest
            | Self::DeleteMirror(_)
            | Self::Pause(_)
            | Self::Rest
            | Self::RefusePublish(_)
            | Self::DeleteUnready(_) => true,
            Self::SandboxExit(_)
            | Self::Fault(..)
            | Self::LoseHints(_)
            | Self::CutHints
            | Self::ExitWithHints(..)
            | Self::ExitWithProxy(..)
            | Self::ExitWithReporter(..)
            | Self::ExitWithOutage(..)
            | Self::RuntimeRestart
            | Self::ApiFault(..)
            | Self::ApiRestart(_)
            | Self::DoubleHints(_)
            | Self::RestartUnready(_)
            | Self::SandboxLoss(_)
            | Self::Restart(_) => false,
        }
    }
}

/// Adds what makes one of these pods special.
pub(super) fn add(sim: &Sim, pod: usize, object: &mut Value) {
    let spec = &mut object["spec"];
    match pod {
        SLOW => {
            let stop = StopReply::Exits { after: STOP, code: 143 };
            sim.runtime.behave(&format!("c-{}", name(pod)), Behaviour { exit: None, stop });
            spec["containers"][0]["readinessProbe"] = probe("readiness", &name(pod));
        }
        IMAGE => spec["volumes"] = json!([{"name": "data", "image": {"reference": "example.test/files:1"}}]),
        CSI => {
            spec["volumes"] = json!([{"name": "data", "persistentVolumeClaim": {"claimName": CLAIM}}]);
        }
        _ => return,
    }
    if pod != SLOW {
        spec["containers"][0]["volumeMounts"] = json!([{"name": "data", "mountPath": "/data"}]);
    }
}

/// Starts the driver and creates the claim of the pods.
pub(super) fn driver(sim: &Sim) -> DriverThread {
    let driver = start_driver(sim);
    csi_driver(sim, json!({"attachRequired": false, "requiresRepublish": true}));
    bound_claim(sim, CLAIM, |_| {});
    driver
}

/// Runs an action. `lost` are the pods whose sandbox was stopped before.
pub(super) async fn act(
    sim: &Sim,
    rules: &Rules,
    driver: &DriverThread,
    lost: &BTreeSet<usize>,
    action: Action,
) {
    if !action.is_calm() {
        rules.set_calm(false);
    }
    match action {
        Action::Rest => {
            rules.assert_kept();
            sim.runtime.unscript_all();
            sim.api.faults().clear();
            // Lost events are compensated as at the end of a sequence.
            sim.runtime.drop_events(0);
            sim.runtime.cut_event_streams();
            pass_all(rules);
            settle_within(REST, sim, lost).await;
            rules.set_calm(true);
        }
        Action::RefusePublish(ms) => {
            let pod = name(CSI);
            rules.set_failing("publish", &pod, true);
            fault::set(driver.state(), &[("NodePublishVolume", Fault::Code(INTERNAL))]).unwrap();
            // The driver loses its mount, if it has one.
            let _none = volumes::unmount(&mount_of(sim, &uid(sim, CSI), &format!("pv-{CLAIM}")));
            tokio::time::sleep(Duration::from_millis(ms)).await;
            fault::set(driver.state(), &[]).unwrap();
            rules.set_failing("publish", &pod, false);
        }
        Action::DeleteUnready(grace) => {
            may_become(sim, SLOW, Seen::is_ready).await;
            // The pod may not exist.
            let _none = sim.api.delete("pods", "default", &name(SLOW), Some(grace));
            rules.set_failing("readiness", &name(SLOW), true);
            tokio::time::sleep(UNREADY).await;
        }
        other => super::act(sim, rules, other).await,
    }
}

/// Makes all probes pass.
pub(super) fn pass_all(rules: &Rules) {
    for (kind, pod) in PROBES.into_iter().flat_map(|kind| PROBED.map(|pod| (kind, pod))) {
        rules.set_failing(kind, &name(pod), false);
    }
    rules.set_failing("readiness", &name(SLOW), false);
}
