//! Tables and histories of the inventory.

use proptest::prelude::*;

use super::*;

fn key(name: &str) -> ClaimKey {
    ClaimKey { namespace: "ns".to_owned(), name: name.to_owned() }
}

// A claim with a device of each of these drivers.
fn claim(name: &str, uid: &str, drivers: &str) -> AllocatedClaim {
    let device =
        |driver: &str| (driver.to_owned(), "pool".to_owned(), format!("dev-{uid}"), "request".to_owned());
    AllocatedClaim {
        key: key(name),
        uid: uid.to_owned(),
        devices: drivers.split_whitespace().map(device).collect(),
    }
}

fn device(cdi: &str, requests: &str) -> PreparedDevice {
    PreparedDevice {
        pool: "pool".to_owned(),
        device: cdi.to_owned(),
        requests: requests.split_whitespace().map(str::to_owned).collect(),
        cdi: vec![cdi.to_owned()],
        ..PreparedDevice::default()
    }
}

fn start(start: Result<OperationStart, ClaimError>) -> String {
    match start {
        Ok(OperationStart::Busy(key)) => format!("busy {key}"),
        Ok(OperationStart::Begun(batches)) => {
            let batch = |(driver, calls): (&String, &Vec<ClaimCall>)| {
                let names: Vec<_> = calls.iter().map(|call| call.key.name.as_str()).collect();
                format!("{driver}:{}", names.join(","))
            };
            batches.iter().map(batch).collect::<Vec<_>>().join(" ")
        }
        Err(error) => error.to_string(),
    }
}

fn prepare(inventory: &mut ClaimInventory, pod: &str, claims: &[AllocatedClaim]) -> String {
    let begun = start(inventory.begin_prepare(pod, claims));
    inventory.finish_prepare(claims, true);
    begun
}

fn counts(inventory: &ClaimInventory) -> String {
    let counts = inventory.in_use();
    counts.iter().map(|(driver, count)| format!("{driver}={count}")).collect::<Vec<_>>().join(" ")
}

#[test]
fn a_shared_claim_is_prepared_once_and_unprepared_after_its_last_pod() {
    let mut inventory = ClaimInventory::default();
    let claims = [claim("a", "1", "x y"), claim("b", "2", "y")];
    assert_eq!(prepare(&mut inventory, "p", &claims), "x:a y:a,b");
    assert_eq!(prepare(&mut inventory, "q", &claims[..1]), "");
    assert_eq!(prepare(&mut inventory, "p", &claims), "");
    assert_eq!(counts(&inventory), "<any>=2 x=1 y=2");
    assert_eq!(start(Ok(inventory.begin_unprepare("p"))), "y:b");
    inventory.finish_unprepare("p", &BTreeSet::new());
    assert!(!inventory.holds_any("p") && inventory.holds_all("q", &[key("a")]));
    // A pod that was never recorded releases nothing (kubernetes/kubernetes#140212).
    assert_eq!(start(Ok(inventory.begin_unprepare("p"))), "");
    assert_eq!(start(Ok(inventory.begin_unprepare("q"))), "x:a y:a");
    inventory.finish_unprepare("q", &BTreeSet::new());
    assert!(inventory.records().is_empty());
    assert_eq!(counts(&inventory), "<any>=0");
}

#[test]
fn a_claim_has_one_operation_at_a_time() {
    let mut inventory = ClaimInventory::default();
    let (a, b) = ([claim("a", "1", "x")], [claim("b", "2", "x")]);
    let both = [a[0].clone(), b[0].clone()];
    assert_eq!(start(inventory.begin_prepare("p", &a)), "x:a");
    assert_eq!(start(inventory.begin_prepare("q", &both)), "busy ns/a");
    // Nothing of the other claim has begun.
    assert!(!inventory.holds_any("q"));
    assert_eq!(start(Ok(inventory.begin_unprepare("p"))), "busy ns/a");
    assert_eq!(prepare(&mut inventory, "r", &b), "x:b");
    inventory.finish_prepare(&a, true);
    assert_eq!(start(Ok(inventory.begin_unprepare("p"))), "x:a");
    // A pod waits while the claim is unprepared (kubernetes/kubernetes#140527), also if the claim is another
    // one with its name.
    assert_eq!(start(inventory.begin_prepare("q", &both)), "busy ns/a");
    assert_eq!(start(inventory.begin_prepare("q", &[claim("a", "9", "x")])), "busy ns/a");
    inventory.finish_unprepare("p", &BTreeSet::new());
    assert_eq!(start(inventory.begin_prepare("q", &both)), "x:a");
}

#[test]
fn a_pod_without_a_record_is_adopted_with_the_drivers_of_its_claims() {
    let mut inventory = ClaimInventory::default();
    let claims = [claim("a", "1", "x y"), claim("b", "2", "x")];
    assert_eq!(inventory.adopt("p", &claims), OperationStart::Begun(Batches::new()));
    assert_eq!(start(Ok(inventory.begin_unprepare("p"))), "x:a,b y:a");
    // Not during an operation: its end may remove the claim.
    assert_eq!(inventory.adopt("q", &claims), OperationStart::Busy(key("a")));
    assert!(!inventory.holds_any("q"));
    inventory.finish_unprepare("p", &BTreeSet::new());
    assert_eq!(inventory.records().len(), 0);
    // Another claim of the name is not that of the pod.
    prepare(&mut inventory, "r", &[claim("a", "9", "x")]);
    assert_eq!(inventory.adopt("q", &claims[..1]), OperationStart::Begun(Batches::new()));
    assert!(!inventory.holds_any("q"));
}

#[test]
fn a_recorded_claim_that_another_pod_shares_is_released_without_a_call() {
    let mut inventory = ClaimInventory::default();
    prepare(&mut inventory, "p", &[claim("a", "1", "x"), claim("b", "2", "x")]);
    inventory.share("q", &[key("a"), key("unknown")]);
    assert!(inventory.record(&key("unknown")).is_none());
    assert_eq!(start(Ok(inventory.begin_unprepare("p"))), "x:b");
    // The claim is in an operation, whose end removes it.
    inventory.share("q", &[key("b")]);
    inventory.finish_unprepare("p", &BTreeSet::new());
    assert_eq!(inventory.records().into_keys().collect::<Vec<_>>(), [key("a")]);
    assert_eq!(start(Ok(inventory.begin_unprepare("q"))), "x:a");
}

#[test]
fn a_claim_with_the_name_of_a_prepared_one_is_refused_and_nothing_is_recorded() {
    let mut inventory = ClaimInventory::default();
    prepare(&mut inventory, "p", &[claim("a", "1", "x")]);
    let later = [claim("b", "2", "x"), claim("a", "9", "x")];
    let text =
        "old ResourceClaim with same name a and different UID 1 still exists (previous pod force-deleted?!)";
    assert_eq!(start(inventory.begin_prepare("q", &later)), text);
    assert!(!inventory.holds_any("q") && inventory.record(&key("b")).is_none());
    let mut again = claim("a", "1", "x");
    again.devices = [("x".to_owned(), "pool".to_owned(), "other".to_owned(), "request".to_owned())].into();
    let text = "ResourceClaim a was allocated again while its earlier devices are prepared for another pod";
    assert_eq!(start(inventory.begin_prepare("q", &[again])), text);
}

#[test]
fn after_a_failure_the_pod_stays_recorded_and_all_drivers_are_called_again() {
    let mut inventory = ClaimInventory::default();
    let claims = [claim("a", "1", "x y")];
    inventory.begin_prepare("p", &claims).unwrap();
    inventory.set_devices(&key("a"), "x", vec![device("x/d=1", "")]);
    inventory.finish_prepare(&claims, false);
    assert!(inventory.holds_any("p"));
    // A container that starts again has the devices of both drivers or waits.
    assert!(inventory.holds_all("p", &[key("a")]) && !inventory.has_devices("p", &[key("a")]));
    assert_eq!(start(inventory.begin_prepare("p", &claims)), "x:a y:a");
    // The devices of the first attempt are replaced (kubernetes/kubernetes#140274).
    inventory.set_devices(&key("a"), "x", vec![device("x/d=1", "")]);
    inventory.finish_prepare(&claims, true);
    assert_eq!(inventory.record(&key("a")).unwrap().drivers["x"].len(), 1);
    assert_ne!(inventory.begin_unprepare("p"), OperationStart::Busy(key("a")));
    inventory.finish_unprepare("p", &[key("a")].into());
    assert!(inventory.holds_any("p"));
    // Another pod that comes now does not rely on what is left.
    assert_eq!(start(inventory.begin_prepare("q", &claims)), "x:a y:a");
    inventory.finish_prepare(&claims, true);
    assert_eq!(start(Ok(inventory.begin_unprepare("p"))), "");
    assert_eq!(start(Ok(inventory.begin_unprepare("q"))), "x:a y:a");
}

#[test]
fn a_restored_claim_is_prepared_again_and_its_devices_are_known_before() {
    let mut before = ClaimInventory::default();
    let claims = [claim("a", "1", "x")];
    before.begin_prepare("p", &claims).unwrap();
    before.set_devices(&key("a"), "x", vec![device("x/d=1", "")]);
    before.finish_prepare(&claims, true);
    let mut inventory = ClaimInventory::restored(before.records());
    assert!(inventory.holds_all("p", &[key("a")]));
    // The kubelet counts a claim once it has prepared it itself.
    assert_eq!(counts(&inventory), "<any>=0");
    let requests = BTreeMap::from([("a".to_owned(), vec![String::new()])]);
    assert_eq!(inventory.cdi_devices("p", "ns", &requests), Ok(vec!["x/d=1".to_owned()]));
    // The claim was allocated again meanwhile: the earlier driver is recorded until the end, and the new one
    // is called.
    assert_eq!(prepare(&mut inventory, "q", &[claim("a", "1", "y")]), "y:a");
    assert_ne!(inventory.begin_unprepare("p"), OperationStart::Busy(key("a")));
    assert_eq!(start(Ok(inventory.begin_unprepare("q"))), "x:a y:a");
}

#[test]
fn a_claim_counts_as_in_use_from_its_preparation_by_all_drivers_until_it_is_unprepared() {
    let mut inventory = ClaimInventory::default();
    let claims = [claim("a", "1", "x y")];
    inventory.begin_prepare("p", &claims).unwrap();
    inventory.set_devices(&key("a"), "x", vec![device("x/d=1", "")]);
    assert_eq!(counts(&inventory), "<any>=0", "a call is in progress");
    inventory.finish_prepare(&claims, false);
    assert_eq!(counts(&inventory), "<any>=0", "a driver failed");
    inventory.begin_prepare("p", &claims).unwrap();
    inventory.finish_prepare(&claims, true);
    assert_eq!(counts(&inventory), "<any>=1 x=1 y=1");
    assert_ne!(inventory.begin_unprepare("p"), OperationStart::Busy(key("a")));
    assert_eq!(counts(&inventory), "<any>=1 x=1 y=1", "a call is in progress");
    inventory.finish_unprepare("p", &[key("a")].into());
    assert_eq!(counts(&inventory), "<any>=1 x=1 y=1", "a driver failed");
    assert_ne!(inventory.begin_unprepare("p"), OperationStart::Busy(key("a")));
    inventory.finish_unprepare("p", &BTreeSet::new());
    assert_eq!(counts(&inventory), "<any>=0");
}

#[test]
fn a_claim_without_devices_needs_no_driver() {
    let mut inventory = ClaimInventory::default();
    let claims = [claim("a", "1", "")];
    assert_eq!(prepare(&mut inventory, "p", &claims), "");
    assert!(inventory.holds_any("p"));
    assert_eq!(start(Ok(inventory.begin_unprepare("p"))), "");
    inventory.finish_unprepare("p", &BTreeSet::new());
    assert!(inventory.records().is_empty());
}

#[test]
fn a_container_gets_the_devices_of_its_requests_once() {
    let mut inventory = ClaimInventory::default();
    let claims = [claim("a", "1", "x y"), claim("b", "2", "x")];
    inventory.begin_prepare("p", &claims).unwrap();
    let devices = vec![device("x/d=1", "big/first"), device("x/d=2", "small"), device("x/d=3", "")];
    inventory.set_devices(&key("a"), "x", devices);
    inventory.set_devices(&key("a"), "y", vec![device("y/d=1", "big small")]);
    inventory.set_devices(&key("b"), "x", vec![device("x/d=3", ""), device("x/d=4", "")]);
    inventory.finish_prepare(&claims, true);
    let table = [
        ("a=", "x/d=1 x/d=2 x/d=3 y/d=1"),
        ("a=big", "x/d=1 x/d=3 y/d=1"),
        ("a=small", "x/d=2 x/d=3 y/d=1"),
        ("a=other", "x/d=3"),
        ("a=big,small", "x/d=1 x/d=3 y/d=1 x/d=2"),
        ("a=small b=", "x/d=2 x/d=3 y/d=1 x/d=4"),
        ("", ""),
        ("c=", "internal error: unable to get claim info for ResourceClaim c in namespace ns"),
    ];
    for (text, expected) in table {
        let requests = text.split_whitespace().map(|entry| {
            let (claim, requests) = entry.split_once('=').unwrap();
            (claim.to_owned(), requests.split(',').map(str::to_owned).collect())
        });
        let names = match inventory.cdi_devices("p", "ns", &requests.collect()) {
            Ok(names) => names.join(" "),
            Err(error) => error.to_string(),
        };
        assert_eq!(names, expected, "{text}");
    }
    // Another pod does not get the devices by naming the claim.
    let requests = BTreeMap::from([("a".to_owned(), vec![String::new()])]);
    assert!(inventory.cdi_devices("q", "ns", &requests).is_err());
    let used = |cdi: &str| inventory.users_of("x", &[("pool".to_owned(), cdi.to_owned())].into());
    assert_eq!((used("x/d=4"), used("y/d=1")), (["p".to_owned()].into(), BTreeSet::new()));
}

#[derive(Debug, Clone)]
enum Action {
    // A pod starts with the claims of this mask.
    Prepare { pod: u8, claims: u8 },
    // The call of the oldest operation in flight ends.
    Finish { is_ok: bool },
    // The pod ends: its containers have stopped.
    End(u8),
    // This process is killed, and another one reads the record.
    Kill,
    // Pods that are gone are unprepared.
    Reconcile,
}

fn action() -> impl Strategy<Value = Action> {
    prop_oneof![
        5 => (0..4_u8, 1..8_u8).prop_map(|(pod, claims)| Action::Prepare { pod, claims }),
        8 => any::<bool>().prop_map(|is_ok| Action::Finish { is_ok }),
        4 => (0..4_u8).prop_map(Action::End),
        1 => Just(Action::Kill),
        1 => Just(Action::Reconcile),
    ]
}

#[derive(Debug)]
enum InFlight {
    Prepare { pod: String, claims: Vec<AllocatedClaim>, batches: Batches },
    Unprepare { pod: String, batches: Batches },
}

/// A node with one driver per claim name, as the calls and the disk leave it.
#[derive(Debug, Default)]
struct Model {
    inventory: ClaimInventory,
    disk: BTreeMap<ClaimKey, ClaimRecord>,
    // Claims that the driver may have prepared: all that it was called for, until it has unprepared them.
    at_driver: BTreeSet<ClaimKey>,
    // Claims that the driver has certainly prepared.
    ready: BTreeSet<ClaimKey>,
    // Pods whose containers may run, with their claims.
    running: BTreeMap<String, BTreeSet<ClaimKey>>,
    // Pods that have ended and are not unprepared yet.
    ended: BTreeSet<String>,
    in_flight: Vec<InFlight>,
}

impl Model {
    fn write(&mut self) {
        self.disk = self.inventory.records();
    }

    fn prepare(&mut self, pod: String, mask: u8) {
        let busy = |op: &InFlight| match op {
            InFlight::Prepare { pod: other, .. } | InFlight::Unprepare { pod: other, .. } => *other == pod,
        };
        if self.running.contains_key(&pod) || self.ended.contains(&pod) || self.in_flight.iter().any(busy) {
            return;
        }
        let of_mask = |bit: &u8| mask & (1 << bit) != 0;
        let claims: Vec<_> =
            (0..3_u8).filter(of_mask).map(|n| claim(&n.to_string(), &n.to_string(), "x y")).collect();
        if let Ok(OperationStart::Begun(batches)) = self.inventory.begin_prepare(&pod, &claims) {
            self.write();
            self.at_driver.extend(batches.values().flatten().map(|call| call.key.clone()));
            self.in_flight.push(InFlight::Prepare { pod, claims, batches });
        }
    }

    fn unprepare(&mut self, pod: &str) {
        if let OperationStart::Begun(batches) = self.inventory.begin_unprepare(pod) {
            for call in batches.values().flatten() {
                let users = self.running.iter().filter(|(_, claims)| claims.contains(&call.key));
                assert_eq!(users.count(), 0, "{} is unprepared under a running pod", call.key);
                self.ready.remove(&call.key);
            }
            self.in_flight.push(InFlight::Unprepare { pod: pod.to_owned(), batches });
        }
    }

    fn finish(&mut self, is_ok: bool) {
        if self.in_flight.is_empty() {
            return;
        }
        match self.in_flight.remove(0) {
            InFlight::Prepare { pod, claims, batches } => {
                if is_ok {
                    self.ready.extend(batches.values().flatten().map(|call| call.key.clone()));
                }
                let is_ok = is_ok || batches.is_empty();
                self.inventory.finish_prepare(&claims, is_ok);
                self.write();
                if is_ok {
                    let keys: BTreeSet<_> = claims.into_iter().map(|claim| claim.key).collect();
                    assert!(keys.is_subset(&self.ready), "{keys:?} {:?}", self.ready);
                    self.running.insert(pod, keys);
                } else {
                    // Its worker ends it.
                    self.ended.insert(pod);
                }
            }
            InFlight::Unprepare { pod, batches } => {
                let calls = batches.values().flatten().map(|call| call.key.clone());
                let failed = if is_ok { BTreeSet::new() } else { calls.clone().collect() };
                if is_ok {
                    calls.for_each(|key| {
                        self.at_driver.remove(&key);
                    });
                }
                self.inventory.finish_unprepare(&pod, &failed);
                self.write();
                if failed.is_empty() {
                    self.ended.remove(&pod);
                }
            }
        }
    }

    fn kill(&mut self) {
        for op in self.in_flight.drain(..) {
            match op {
                InFlight::Prepare { pod, .. } | InFlight::Unprepare { pod, .. } => self.ended.insert(pod),
            };
        }
        self.inventory = ClaimInventory::restored(self.disk.clone());
    }

    fn reconcile(&mut self) {
        for pod in self.inventory.pods() {
            if !self.running.contains_key(&pod) {
                self.ended.insert(pod.clone());
                self.unprepare(&pod);
            }
        }
    }

    fn check(&self) {
        let recorded: BTreeSet<_> = self.disk.keys().cloned().collect();
        assert!(self.at_driver.is_subset(&recorded), "lost: {:?} {recorded:?}", self.at_driver);
        for (pod, claims) in &self.running {
            assert!(claims.is_subset(&self.ready), "{pod} runs without {claims:?}: {:?}", self.ready);
            let keys: Vec<_> = claims.iter().cloned().collect();
            assert!(self.inventory.holds_all(pod, &keys), "{pod} {keys:?}");
        }
    }
}

proptest! {
    /// Pods come and go while calls fail and this process is killed between any two events.
    #[test]
    fn no_claim_is_unprepared_under_a_pod_and_none_stays_prepared_without_one(
        actions in prop::collection::vec(action(), 0..80),
    ) {
        let mut model = Model::default();
        for action in actions {
            match action {
                Action::Prepare { pod, claims } => model.prepare(pod.to_string(), claims),
                Action::Finish { is_ok } => model.finish(is_ok),
                Action::End(pod) => {
                    let pod = pod.to_string();
                    if model.running.remove(&pod).is_some() {
                        model.ended.insert(pod.clone());
                    }
                    let is_active = model.in_flight.iter().any(|op| match op {
                        InFlight::Prepare { pod: other, .. } | InFlight::Unprepare { pod: other, .. } => *other == pod,
                    });
                    if model.ended.contains(&pod) && !is_active {
                        model.unprepare(&pod);
                    }
                }
                Action::Kill => model.kill(),
                Action::Reconcile => if model.in_flight.is_empty() { model.reconcile() },
            }
            model.check();
        }
        // Everything ends: the driver has nothing left.
        while !model.in_flight.is_empty() {
            model.finish(true);
        }
        model.running.clear();
        for _ in 0..2 {
            model.reconcile();
            while !model.in_flight.is_empty() {
                model.finish(true);
            }
        }
        prop_assert!(model.at_driver.is_empty() && model.disk.is_empty(), "{model:?}");
    }
}
