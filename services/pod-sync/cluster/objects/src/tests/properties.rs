//! After any history, the watched objects are those that a pod refers to, but for immutable ones that were
//! read.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use proptest::prelude::*;

use super::Node;
use crate::ChangeDetectionStrategy as Detection;

const PODS: usize = 4;
const OBJECTS: usize = 4;

#[derive(Debug, Clone)]
enum Action {
    Register(usize, Vec<usize>),
    Unregister(usize),
    Put(usize, bool),
    Delete(usize),
    Read(usize),
    CloseWatches,
    BreakWatches,
    ExpireWatches,
}

fn action() -> impl Strategy<Value = Action> {
    let object = 0..OBJECTS;
    prop_oneof![
        4 => (0..PODS, prop::collection::vec(0..OBJECTS, 0..4)).prop_map(|(p, o)| Action::Register(p, o)),
        2 => (0..PODS).prop_map(Action::Unregister),
        3 => (object.clone(), prop::bool::weighted(0.3)).prop_map(|(o, i)| Action::Put(o, i)),
        1 => object.clone().prop_map(Action::Delete),
        4 => object.prop_map(Action::Read),
        1 => Just(Action::CloseWatches),
        1 => Just(Action::BreakWatches),
        1 => Just(Action::ExpireWatches),
    ]
}

fn name(object: usize) -> String {
    format!("m{object}")
}

fn key(object: usize) -> String {
    format!("configmaps/{}", name(object))
}

/// A node, and what is expected of it.
struct World {
    node: Node,
    pods: BTreeMap<usize, BTreeSet<usize>>,
    // Immutable objects that were read while referenced, as they were read.
    kept: BTreeMap<usize, String>,
    // Content and immutability of the objects.
    objects: BTreeMap<usize, (String, bool)>,
    writes: u32,
}

impl World {
    fn referenced(&self) -> BTreeSet<usize> {
        self.pods.values().flatten().copied().collect()
    }

    async fn apply(&mut self, action: &Action) {
        match action {
            Action::Register(pod, objects) => {
                let names: Vec<String> = objects.iter().map(|o| name(*o)).collect();
                let names: Vec<&str> = names.iter().map(String::as_str).collect();
                self.node.register(&format!("p{pod}"), &names);
                self.pods.insert(*pod, objects.iter().copied().collect());
            }
            Action::Unregister(pod) => {
                self.node.unregister(&format!("p{pod}"));
                self.pods.remove(pod);
            }
            Action::Put(object, is_immutable) => {
                self.writes += 1;
                let value = self.writes.to_string();
                self.node.api.put(&key(*object), &value, *is_immutable);
                self.objects.insert(*object, (value, *is_immutable));
            }
            Action::Delete(object) => {
                if self.node.api.exists(&key(*object)) {
                    self.node.api.delete(&key(*object));
                }
                self.objects.remove(object);
            }
            Action::Read(object) => self.read(*object).await,
            Action::CloseWatches => self.node.api.close_watches(),
            Action::BreakWatches => self.node.api.break_watches(),
            Action::ExpireWatches => self.node.api.expire_watches(),
        }
        let referenced = self.referenced();
        self.kept.retain(|object, _| referenced.contains(object));
        // Longer than the first back-off.
        tokio::time::sleep(Duration::from_secs(5)).await;
    }

    async fn read(&mut self, object: usize) {
        let read = self.node.read(&name(object)).await;
        let want =
            match (self.referenced().contains(&object), self.kept.get(&object), self.objects.get(&object)) {
                (false, ..) => Err(format!("object \"default\"/\"m{object}\" not registered")),
                (true, Some(kept), _) => Ok(kept.clone()),
                (true, None, Some((value, is_immutable))) => {
                    if *is_immutable {
                        self.kept.insert(object, value.clone());
                    }
                    Ok(value.clone())
                }
                (true, None, None) => Err(format!("configmap \"m{object}\" not found")),
            };
        assert_eq!(read, want);
    }

    fn check(&self) {
        let wanted: BTreeSet<usize> =
            self.referenced().into_iter().filter(|object| !self.kept.contains_key(object)).collect();
        let (config_maps, secrets) = self.node.cache.watched();
        let watched: BTreeSet<String> = config_maps.into_iter().map(|key| key.name).collect();
        assert_eq!(watched, wanted.iter().map(|o| name(*o)).collect());
        assert_eq!(self.node.api.watched(), wanted.iter().map(|o| key(*o)).collect());
        assert!(secrets.is_empty());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: quintlet_testkit::budget::cases(300), ..ProptestConfig::default() })]

    #[test]
    fn the_watched_objects_are_those_that_pods_refer_to_but_for_immutable_ones_that_were_read(
        actions in prop::collection::vec(action(), 0..40),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().start_paused(true).enable_time().build().unwrap();
        runtime.block_on(async {
            let node = Node::with(Detection::Watch, Duration::from_secs(3600));
            let pods = BTreeMap::new(); let kept = BTreeMap::new(); let objects = BTreeMap::new();
            let mut world = World { node, pods, kept, objects, writes: 0 };
            for action in &actions {
                world.apply(action).await;
                world.check();
            }
        });
    }
}
