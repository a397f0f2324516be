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
	// Without WithAuthority, the path of the socket would be the authority of each request, which servers in Rust refuse.
	plain := grpc.WithTransportCredentials(insecure.NewCredentials())
	connection, err := grpc.NewClient("unix://"+socket, plain, grpc.WithAuthority("localhost"))
	if err != nil {
		log.Fatal(err)
	}
	client := subscribe.NewContainersClient(connection)
	var cursor *subscribe.Cursor
	seen := map[string]bool{}
	for ; ; time.Sleep(time.Second) {
		// A stream continues after the last cursor. Exits before the first snapshot are not printed.
		log.Print(watch(client, &cursor, seen))
	}
}

func watch(client subscribe.ContainersClient, cursor **subscribe.Cursor, seen map[string]bool) error {
	isFirst := *cursor == nil
	stream, err := client.Watch(context.Background(), &subscribe.WatchContainersRequest{Resume: *cursor})
	for err == nil {
		var event *subscribe.WatchContainersEvent
		if event, err = stream.Recv(); err != nil {
			break
		}
		if event.Cursor != nil {
			*cursor, isFirst = event.Cursor, false
		}
		pod := event.GetPod()
		for _, container := range pod.GetContainers() {
			key := fmt.Sprint(pod.Uid, "/", container.Name, "/", container.RestartCount)
			if container.State != subscribe.ContainerState_CONTAINER_STATE_EXITED || seen[key] {
				continue
			}
			if seen[key] = true; !isFirst {
				fmt.Println(pod.Namespace, pod.Name, container.Name, container.ExitCode, container.Reason)
			}
		}
	}
	return err
}
