//! Decides the events of a watch from the views of the pods.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Pod, PodStatus};
use pod_sync_views::PodView;
use quintlet_model::ids::PodUid;
use quintlet_pods_api::v1alpha1::EventType;

/// The views that a watch has sent. It sends the newest state of a pod only.
#[derive(Debug, Default)]
pub(super) struct Watched(BTreeMap<PodUid, Arc<PodView>>);

impl Watched {
    /// Returns the events after which a watcher has the pods of `now`: the removed pods, then the others by
    /// UID.
    pub(super) fn advance(&mut self, now: Vec<Arc<PodView>>) -> Vec<(EventType, Arc<PodView>)> {
        let now: BTreeMap<_, _> = now.into_iter().map(|view| (view.pod_ref.uid.clone(), view)).collect();
        let removed = self.0.values().filter(|sent| !now.contains_key(&sent.pod_ref.uid));
        let mut events: Vec<_> = removed.map(|sent| (EventType::Deleted, Arc::clone(sent))).collect();
        for (uid, view) in &now {
            match self.0.get(uid) {
                None => events.push((EventType::Added, Arc::clone(view))),
                Some(sent) if !is_same_object(sent, view) => {
                    events.push((EventType::Modified, Arc::clone(view)));
                }
                Some(_) => {}
            }
        }
        self.0 = now;
        events
    }
}

fn is_same_object(old: &PodView, new: &PodView) -> bool {
    old.version == new.version
        || ((Arc::ptr_eq(&old.pod, &new.pod) || old.pod == new.pod)
            && old.status == new.status
            && old.deletion == new.deletion)
}

/// Returns the pod of an event. Of a deleted pod, only name, namespace and UID are sent.
pub(super) fn object(kind: EventType, view: &PodView) -> Pod {
    if kind != EventType::Deleted {
        return whole(view);
    }
    let mut pod = Pod::default();
    pod.metadata.name = Some(view.pod_ref.name.to_string());
    pod.metadata.namespace = Some(view.pod_ref.namespace.to_string());
    pod.metadata.uid = Some(view.pod_ref.uid.to_string());
    pod
}

/// Returns a pod with its status. Where pod-sync has not computed one, that of the source says nothing about
/// this node: the pod is pending unless it has a phase, and not ready
/// (`pkg/kubelet/apis/pods/server.go: getEffectivePodStatus`).
fn whole(view: &PodView) -> Pod {
    let mut pod = view.object();
    if view.status.is_none() {
        unverified(pod.status.get_or_insert_default());
    }
    pod
}

fn unverified(status: &mut PodStatus) {
    status.phase.get_or_insert_with(|| "Pending".to_owned());
    let ready = |condition: &&mut k8s_openapi::api::core::v1::PodCondition| {
        condition.type_ == "Ready" && condition.status == "True"
    };
    if let Some(condition) = status.conditions.iter_mut().flatten().find(ready) {
        "False".clone_into(&mut condition.status);
        condition.reason = Some("ContainersNotReady".to_owned());
        condition.message = Some("Kubelet is initializing pod containers".to_owned());
    }
}

#[cfg(test)]
pub(super) mod tests {
    use pod_sync_layout::SourceKind;
    use quintlet_model::ids::PodRef;
    use serde_json::json;

    use super::*;

    /// A view of the pod `uid` with a phase.
    pub(crate) fn view(uid: &str, phase: Option<&str>, version: u64) -> Arc<PodView> {
        let status = phase.map(|phase| PodStatus { phase: Some(phase.to_owned()), ..PodStatus::default() });
        let pod = json!({"metadata": {"name": format!("pod-{uid}"), "namespace": "ns", "uid": uid}});
        Arc::new(PodView {
            pod_ref: PodRef {
                uid: PodUid::parse(uid).unwrap(),
                namespace: "ns".into(),
                name: format!("pod-{uid}").into(),
            },
            source: SourceKind::File,
            pod: Arc::new(serde_json::from_value(pod).unwrap()),
            status: status.map(Arc::new),
            deletion: None,
            worker: "sync",
            is_removed: false,
            waiting: None,
            decision: Arc::default(),
            created_unix_ns: 1,
            resource_version: String::new(),
            mirror_uid: String::new(),
            version,
        })
    }

    #[test]
    fn a_watch_gets_each_pod_then_what_changed_of_it() {
        let mut watched = Watched::default();
        for (now, expected) in [
            (vec![view("b", Some("Pending"), 2), view("a", None, 1)], &[("ADDED", "a"), ("ADDED", "b")][..]),
            (vec![view("a", None, 1), view("b", Some("Pending"), 2)], &[]),
            // A new version without a difference, such as another wait of the pod.
            (vec![view("a", None, 3), view("b", Some("Running"), 4)], &[("MODIFIED", "b")]),
            (
                vec![view("c", None, 5), view("b", Some("Failed"), 6)],
                &[("DELETED", "a"), ("MODIFIED", "b"), ("ADDED", "c")],
            ),
            (vec![], &[("DELETED", "b"), ("DELETED", "c")]),
        ] {
            let events = watched.advance(now);
            let got: Vec<_> =
                events.iter().map(|(kind, view)| (kind.as_str_name(), view.pod_ref.uid.as_str())).collect();
            assert_eq!(got, expected);
        }
    }

    #[test]
    fn a_deleted_pod_has_its_names_only() {
        let pod = object(EventType::Deleted, &view("a", Some("Running"), 1));
        let expected = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod-a", "namespace": "ns", "uid": "a"}});
        assert_eq!(serde_json::to_value(&pod).unwrap(), expected);
        assert_eq!(
            object(EventType::Modified, &view("a", Some("Running"), 1)).status.unwrap().phase.unwrap(),
            "Running"
        );
    }

    #[test]
    fn a_status_that_is_not_of_this_node_is_never_ready() {
        let conditions = |status: &str| json!([{"type": "Initialized", "status": "True"}, {"type": "Ready", "status": status}]);
        let not_ready = json!([
            {"type": "Initialized", "status": "True"},
            {"type": "Ready", "status": "False", "reason": "ContainersNotReady", "message": "Kubelet is initializing pod containers"},
        ]);
        for (of_source, own, expected) in [
            (json!({}), None, json!({"phase": "Pending"})),
            (
                json!({"phase": "Running", "conditions": conditions("True")}),
                None,
                json!({"phase": "Running", "conditions": not_ready}),
            ),
            (
                json!({"conditions": conditions("False")}),
                None,
                json!({"phase": "Pending", "conditions": conditions("False")}),
            ),
            (
                json!({"phase": "Running", "conditions": conditions("True")}),
                Some("Failed"),
                json!({"phase": "Failed"}),
            ),
        ] {
            let mut view = (*view("a", own, 1)).clone();
            let mut pod = (*view.pod).clone();
            pod.status = Some(serde_json::from_value(of_source.clone()).unwrap());
            view.pod = Arc::new(pod);
            assert_eq!(serde_json::to_value(whole(&view).status).unwrap(), expected, "{of_source} {own:?}");
        }
    }
}
