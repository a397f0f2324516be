//! The service Cpus of podsync.v1.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use pod_sync_cpus::ContainerCpus;
use pod_sync_machine::Machine;
use pod_sync_placement::{NodePlacement, Placement};
use pod_sync_worker::context::Reporting;
use quintlet_kit::messages::{self, Bounded};
use quintlet_model::ids::PodUid;
use quintlet_proto::podsync::v1 as wire;
use quintlet_proto::podsync::v1::cpus_server;
use tonic::{Request, Response, Status};

/// Lists the CPUs and the memory of the node with the pods that hold them.
#[derive(Debug, Clone)]
pub(crate) struct CpuLists {
    pub(crate) placement: Placement,
    pub(crate) reporting: Arc<Reporting>,
}

#[tonic::async_trait]
impl cpus_server::Cpus for CpuLists {
    type ListStream = Bounded<wire::ListCpusReply>;

    async fn list(&self, _: Request<wire::ListCpusRequest>) -> Result<Response<Self::ListStream>, Status> {
        self.reporting.views.restored().await;
        let names = self.reporting.views.names();
        let machine = self.placement.machine();
        let (first, holders) = self.placement.read(|node| {
            let first = wire::ListCpusReply {
                policies: Some(policies(node)),
                cpus: cpus(node, machine),
                memory: memory(node),
                holders: Vec::new(),
            };
            (first, holders(node, &names))
        });
        let holders = messages::chunks(holders);
        let holders =
            holders.map(|holders| wire::ListCpusReply { holders, ..wire::ListCpusReply::default() });
        Ok(Response::new(Bounded::of_chunks("Cpus.List", std::iter::once(first).chain(holders))))
    }
}

fn policies(node: &NodePlacement) -> wire::ResourcePolicies {
    wire::ResourcePolicies {
        cpu: node.cpu_policy().as_str().to_owned(),
        memory: node.memory_policy().as_str().to_owned(),
        topology: node.topology().name().as_str().to_owned(),
        scope: node.scope().as_str().to_owned(),
    }
}

fn cpus(node: &NodePlacement, machine: &Machine) -> Vec<wire::MachineCpu> {
    let all = machine.cpus.cpus();
    let shared = node.shared().unwrap_or(&all);
    let reserved = node.cpus().map(|cpus| cpus.policy().reserved().clone()).unwrap_or_default();
    let cpu = |(cpu, place): (&pod_sync_machine::CpuId, &pod_sync_machine::CpuPlace)| {
        let is_reserved = reserved.contains(*cpu);
        let usage = match (shared.contains(*cpu), is_reserved) {
            (true, _) => wire::CpuUse::Shared,
            (false, true) => wire::CpuUse::System,
            (false, false) => wire::CpuUse::Exclusive,
        };
        wire::MachineCpu {
            number: cpu.number(),
            core: place.core.number(),
            socket: place.socket.number(),
            numa_node: place.node.number().into(),
            r#use: usage.into(),
            is_reserved,
        }
    };
    machine.cpus.places().iter().map(cpu).collect()
}

fn memory(node: &NodePlacement) -> Vec<wire::NodeMemory> {
    let mut rows = Vec::new();
    for (number, table) in node.memory().into_iter().flat_map(|memory| &memory.tables().0) {
        for (kind, table) in &table.kinds {
            rows.push(wire::NodeMemory {
                numa_node: number.number().into(),
                kind: kind.to_string(),
                allocatable: table.allocatable,
                free: table.free,
            });
        }
    }
    rows
}

fn holders(node: &NodePlacement, pods: &HashMap<PodUid, String>) -> Vec<wire::CpuHolder> {
    let names: BTreeSet<(&str, &str)> = node.holders().collect();
    let holder = |(pod, container): (&str, &str)| {
        let (cpus, is_pod_shared) = match node.container_cpus(pod, container) {
            Some(ContainerCpus::Exclusive(cpus)) => (cpus.to_string(), false),
            Some(ContainerCpus::PodShared(cpus)) => (cpus.to_string(), true),
            Some(ContainerCpus::Shared(_)) | None => (String::new(), false),
        };
        let pod_cpus = node.cpus().and_then(|cpus| cpus.assignments().pod(pod));
        let nodes = node.container_nodes(pod, container);
        wire::CpuHolder {
            pod_uid: pod.to_owned(),
            pod: pods.get(pod).cloned().unwrap_or_default(),
            container: container.to_owned(),
            cpus,
            memory_nodes: nodes.map(|nodes| nodes.to_string()).unwrap_or_default(),
            is_pod_shared,
            pod_cpus: pod_cpus.map(ToString::to_string).unwrap_or_default(),
        }
    };
    let mut holders: Vec<_> = names.into_iter().map(holder).collect();
    holders.sort_by(|a, b| (&a.pod, &a.pod_uid).cmp(&(&b.pod, &b.pod_uid)));
    holders
}
