// Prints each exit of a container with its reason. README.md says how to build it.
package main

import (
	"context"
	"fmt"
	"log"
	"os"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	subscribe "example.com/exits/quintlet/subscribe/v1"
)

func main() {
	socket := "/run/quintlet/subscribe/pleg/subscribe.sock"
	if len(os.Args) > 1 {
		socket = os.Args[1]
	}
	// Without WithAuthority, the path of the socket would be the authority of each request. The services accept it; some proxies do not.
	plain := grpc.WithTransportCredentials(insecure.NewCredentials())
	connection, err := grpc.NewClient("unix://"+socket, plain, grpc.WithAuthority("localhost"))
	if err != nil {
		log.Fatal(err)
	}
	client := subscribe.NewContainersClient(connection)
	var cursor *subscribe.Cursor
	// Exits that were seen, by the UID of the pod.
	seen := map[string]map[string]bool{}
	for ; ; time.Sleep(time.Second) {
		// A stream continues after the last cursor. Exits before the first snapshot are not printed.
		log.Print(watch(client, &cursor, seen))
	}
}

func watch(client subscribe.ContainersClient, cursor **subscribe.Cursor, seen map[string]map[string]bool) error {
	isFirst, present := *cursor == nil, map[string]bool{}
	stream, err := client.Watch(context.Background(), &subscribe.WatchContainersRequest{Resume: *cursor})
	for err == nil {
		var event *subscribe.WatchContainersEvent
		if event, err = stream.Recv(); err != nil {
			break
		}
		if event.Cursor != nil {
			*cursor, isFirst = event.Cursor, false
		}
		if event.GetSnapshotBegin() != nil {
			present = map[string]bool{}
		}
		if event.GetSnapshotEnd() != nil {
			// Pods that are not in a snapshot are gone.
			for uid := range seen {
				if !present[uid] {
					delete(seen, uid)
				}
			}
		}
		if gone := event.GetGone(); gone != nil {
			delete(seen, gone.Uid)
			delete(present, gone.Uid)
		}
		pod := event.GetPod()
		if pod == nil {
			continue
		}
		if present[pod.Uid] = true; seen[pod.Uid] == nil {
			seen[pod.Uid] = map[string]bool{}
		}
		for _, container := range pod.Containers {
			key := fmt.Sprint(container.Name, "/", container.RestartCount)
			if container.State != subscribe.ContainerState_CONTAINER_STATE_EXITED || seen[pod.Uid][key] {
				continue
			}
			if seen[pod.Uid][key] = true; !isFirst {
				fmt.Println(pod.Namespace, pod.Name, container.Name, container.ExitCode, container.Reason)
			}
		}
	}
	return err
}
