// Prints the exits of containers. It continues at the last cursor after a lost connection.
//
//	protoc -I proto --go_out=. --go-grpc_out=. --go_opt=$MAP --go-grpc_opt=$MAP ... (see docs/subscribing.md)
package main

import (
	"context"
	"fmt"
	"log"
	"os"
	"time"

	"google.golang.org/grpc"

	pb "quintlet.dev/api/subscribe/v1"
)

func watch(connection *grpc.ClientConn, cursor *pb.Cursor) (*pb.Cursor, error) {
	client := pb.NewContainersClient(connection)
	events, err := client.Watch(context.Background(), &pb.WatchContainersRequest{Resume: cursor})
	if err != nil {
		return cursor, err
	}
	for {
		event, err := events.Recv()
		if err != nil {
			return cursor, err
		}
		if event.Cursor != nil {
			cursor = event.Cursor
		}
		for _, container := range event.GetPod().GetContainers() {
			if container.State == pb.ContainerState_CONTAINER_STATE_EXITED {
				pod := event.GetPod()
				fmt.Printf("%s/%s %s #%d: %d %s\n", pod.Namespace, pod.Name, container.Name,
					container.RestartCount, container.ExitCode, container.Reason)
			}
		}
	}
}

func main() {
	target := "unix:///run/quintlet/subscribe/pleg/subscribe.sock"
	if len(os.Args) > 1 {
		target = os.Args[1]
	}
	connection, err := grpc.Dial(target, grpc.WithInsecure())
	if err != nil {
		log.Fatal(err)
	}
	var cursor *pb.Cursor
	for {
		cursor, err = watch(connection, cursor)
		log.Print(err)
		time.Sleep(time.Second)
	}
}
